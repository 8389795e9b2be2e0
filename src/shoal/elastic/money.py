"""Money as whole millionths of a dollar: sums of these are exact, sums of floats are not."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

MILLION = 1_000_000
HOUR = 3600


def micros(usd: float | str | Decimal) -> int:
    """Dollars, as people and providers write them, in millionths."""
    if isinstance(usd, float):
        return round(usd * MILLION)
    return int((Decimal(str(usd)) * MILLION).to_integral_value(ROUND_HALF_UP))


def dollars(amount: int) -> float:
    """Millionths in dollars, for contracts and JSON."""
    return amount / MILLION


def for_time(micros_hour: int, seconds: int) -> int:
    """What so many seconds cost at a price an hour."""
    return (micros_hour * seconds + HOUR // 2) // HOUR


def told(amount: int) -> str:
    """`$31.92`, to the cent, as a person reads it."""
    cents = (Decimal(amount) / MILLION).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return f"-${-cents:,}" if cents < 0 else f"${cents:,}"
