"""Whoever can write into a checkpoint directory runs no code in the job that resumes from it; users' state survives."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.cases import cases
from tests.unit.train.training import build
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.optim import lr_scheduler, swa_utils

from shoal.train.checkpoint import Checkpointer, TrainState
from shoal.train.checkpoint import layout as files
from shoal.train.checkpoint.layout import Manifest
from shoal.train.checkpoint.safe_values import decode, encode
from shoal.train.checkpoint.state import capture_state
from shoal.train.checkpoint.writer import CommittingWriter
from shoal.train.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


class Holder:
    """A part of the state that keeps whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def write(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint as an attacker writes it: whole, with correct digests."""
    flat = capture_state(build("plain"), 0)
    change(flat)
    writer = CommittingWriter(directory / "step-1.tmp-0", Manifest(1, 1, "run-1", "periodic", ()))
    dcp.save(flat, storage_writer=writer, no_dist=True)
    assert writer.committed_to == directory / "step-1"


def sign(checkpoint: Path) -> None:
    """Write the manifest of the files as they are now."""
    fields = json.loads((checkpoint / files.MANIFEST).read_text())
    for record in fields["files"]:
        data = (checkpoint / record["name"]).read_bytes()
        record |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / files.MANIFEST).write_text(json.dumps(fields))


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@cases("key", "common", "rank/0")
@cases(
    "attack, name",
    (lambda proof: pickle.dumps({"run_id": "x", "extra_state": Attack(proof)}), "a pickle"),
    (lambda proof: saved(Attack(proof)), "posix.mkdir"),
    (lambda proof: Attack(proof), "posix.mkdir"),
    ids=["pickle", "torch.save", "value of torch"],
)
def test_values_of_a_checkpoint_run_no_code(tmp_path: Path, key: str, attack: Callable[[Path], Any], name: str) -> None:
    proof = tmp_path / "attacked"
    write(tmp_path / "saves", lambda flat: flat.update({key: attack(proof)}))
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path / "saves").restore(build("plain"))
    assert not proof.exists() and caught.value.what == "the checkpoint holds more than data, and is not loaded"
    assert caught.value.found.startswith(f"{name}; whoever can write into the directory")


def test_tensors_of_a_checkpoint_run_no_code(tmp_path: Path) -> None:
    proof = tmp_path / "attacked"
    write(tmp_path / "saves", lambda flat: None)
    checkpoint = tmp_path / "saves" / "step-1"
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    attack = saved(Attack(proof))
    (checkpoint / "__0_0.distcp").write_bytes(attack)
    for info in metadata.storage_data.values():
        object.__setattr__(info, "offset", 0)
        object.__setattr__(info, "length", len(attack))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path / "saves").restore(build("plain"))
    assert not proof.exists() and caught.value.found.startswith("posix.mkdir; ")


def test_index_of_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    proof = tmp_path / "attacked"
    write(tmp_path / "saves", lambda flat: None)
    index = tmp_path / "saves" / "step-1" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = Attack(proof)
    index.write_bytes(pickle.dumps(metadata))
    sign(index.parent)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path / "saves").restore(build("plain"))
    assert not proof.exists() and caught.value.what == "the checkpoint holds more than data, and is not loaded"
    assert caught.value.found.startswith("posix.mkdir; whoever can write into the directory")
    assert "torch.serialization.add_safe_globals" in caught.value.fix


@cases("place", "/dev/zero", "../secret", "sub/file", "")
def test_index_refers_only_to_files_of_the_manifest(tmp_path: Path, place: str) -> None:
    write(tmp_path / "saves", lambda flat: None)
    index = tmp_path / "saves" / "step-1" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", place)
    index.write_bytes(pickle.dumps(metadata))
    sign(index.parent)
    with pytest.raises(CheckpointError, match="refers to files that its manifest does not list"):
        Checkpointer(tmp_path / "saves").restore(build("plain"))


class PicklerOfPython311(pickle.Pickler):
    """Writes members of an enumeration as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def rewrite_index(checkpoint: Path, planner_data: Any = None) -> None:
    index = checkpoint / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = planner_data or metadata.planner_data
    data = io.BytesIO()
    PicklerOfPython311(data).dump(metadata)
    assert b"getattr" in data.getvalue()
    index.write_bytes(data.getvalue())
    sign(checkpoint)


def test_index_written_by_another_python_loads(tmp_path: Path) -> None:
    write(tmp_path / "saves", lambda flat: None)
    rewrite_index(tmp_path / "saves" / "step-1")
    assert Checkpointer(tmp_path / "saves").restore(build("plain", seed=3)) == 1


class Reached:
    """Reaches for an attribute when it is unpickled."""

    def __init__(self, owner: Any, name: str) -> None:
        self.arguments = (owner, name)

    def __reduce__(self) -> Any:
        return getattr, self.arguments


@cases("owner, name", (Path, "home"), (_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__class__"))
def test_getattr_in_an_index_reaches_nothing_else(tmp_path: Path, owner: Any, name: str) -> None:
    write(tmp_path / "saves", lambda flat: None)
    rewrite_index(tmp_path / "saves" / "step-1", Reached(owner, name))
    with pytest.raises(CheckpointError, match="the checkpoint holds more than data"):
        Checkpointer(tmp_path / "saves").restore(build("plain"))


@cases("name", "/dev/zero", "../../secret", "sub/x", "..", ".", "")
def test_manifest_names_only_files_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    write(tmp_path / "saves", lambda flat: None)
    manifest = tmp_path / "saves" / "step-1" / files.MANIFEST
    fields = json.loads(manifest.read_text())
    fields["files"][0] = {"name": name, "size": 0, "sha256": ""}
    manifest.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="it names a file outside the checkpoint"):
        Checkpointer(tmp_path / "saves").restore(build("plain"))


@cases("kind", "fifo", "link", "directory")
def test_files_of_a_checkpoint_are_regular_files(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "saves", lambda flat: None)
    victim = tmp_path / "saves" / "step-1" / "__0_0.distcp"
    victim.rename(tmp_path / "aside")
    if kind == "fifo":
        os.mkfifo(victim)
    elif kind == "link":
        victim.symlink_to(tmp_path / "aside")
    else:
        victim.mkdir()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is not a regular file"):
        Checkpointer(tmp_path / "saves").restore(build("plain"))


Point = namedtuple("Point", "x y")


@cases(
    "value, kind",
    ({"x": Point(1, 2)}, "test_checkpoint_safety.Point"),
    ({"x": [Holder(1)]}, "test_checkpoint_safety.Holder"),
    ({"x": len}, "builtins.builtin_function_or_method"),
)
def test_value_that_could_not_be_read_again_fails_the_save_with_its_place(
    tmp_path: Path, value: Any, kind: str
) -> None:
    state = build("plain")
    state.others = {"mine": Holder(value)}
    result = Checkpointer(tmp_path).save(1, state)
    assert not result.committed and "cannot save state['others']['mine']['x']" in result.error
    assert kind in result.error


def test_class_that_the_script_registers_is_kept(tmp_path: Path) -> None:
    state = build("plain")
    state.others = {"mine": Holder({"x": Holder(7)})}
    with torch.serialization.safe_globals([Holder]):
        assert Checkpointer(tmp_path).save(1, state).committed
        state.others = {"mine": Holder()}
        assert Checkpointer(tmp_path).restore(state) == 1 and state.others["mine"].value["x"].value == 7
        with pytest.raises(CheckpointError):
            encode(Holder(Point(1, 2)), "state")
    with pytest.raises(CheckpointError, match="Holder"):
        Checkpointer(tmp_path).restore(state)


def test_ordinary_values_come_back_as_they_were() -> None:
    values: dict[str, Any] = {
        "numbers": [1, -(2**70), 2**5000, 1.5, float("inf"), True, None, 1 + 2j],
        "text": ["", "ä\u009b", b"\x00\xff", bytearray(b"x")],
        "nested": {(1, "a"): [{"b": ({3, 4}, frozenset({5}))}], 7: OrderedDict(z=1, a=2)},
        "counter": Counter({"a": 2}),
        "deque": deque([1, 2], maxlen=2),
        "defaultdict": defaultdict(list, {"a": [1]}),
        "range": range(0, 9, 2),
        "path": Path("/a/b"),
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cpu")],
        "tagged": ("__shoal__", "array", 1),
        "scalars": [numpy.float32(1.5), numpy.int64(7), numpy.bool_(True), numpy.datetime64("2026-01-01")],
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False)["bit_generator"],
        "pcg64": numpy.random.default_rng(1).bit_generator.state,
    }
    again = decode(encode(values, "state"))
    assert again == values
    for name, value in values.items():
        assert type(again[name]) is type(value)
    assert again["deque"].maxlen == 2 and again["defaultdict"]["new"] == []
    assert [type(item) for item in again["scalars"]] == [type(item) for item in values["scalars"]]
    assert type(again["nested"][7]) is OrderedDict


@cases("dtype", "<f8", ">f4", "u1", "?", "c8", "<U5", "S3", "M8[ns]")
@cases("order", "C", "F")
def test_arrays_come_back(dtype: str, order: Any) -> None:
    array = numpy.asarray(numpy.arange(6).reshape(2, 3).astype("i8").astype(dtype), order=order)
    again = decode(encode({"a": array}, "state"))["a"]
    assert again.dtype == array.dtype and again.shape == (2, 3)
    assert numpy.array_equal(again, array) and again.flags.writeable


@cases("dtype", torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
def test_tensors_come_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    values = {"t": tensor, "view": tensor[1:], "p": torch.nn.Parameter(torch.ones(2)), "empty": torch.empty(0)}
    again = decode(encode(values, "state"))
    assert torch.equal(again["t"].float(), tensor.float()) and again["t"].dtype == dtype
    assert torch.equal(again["view"].float(), tensor[1:].float())
    assert isinstance(again["p"], torch.nn.Parameter) and again["empty"].shape == (0,)


def _half(epoch: int) -> float:
    return 0.5**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, _half),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, _half),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "constant": lambda o: lr_scheduler.ConstantLR(o),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=0.05),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: (
        lr_scheduler.ChainedLR([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)])
        if hasattr(lr_scheduler, "ChainedLR")
        else lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)])
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}
OPTIMIZERS = ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]


def _state(optimizer: str, scheduler: str) -> TrainState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    return TrainState(model, made, SCHEDULERS[scheduler](made), others={"average": average, "scaler": scaler})


def _train(state: TrainState, steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        loss = state.model(torch.randn(4, 3)).square().mean()
        state.optimizer.zero_grad()  # type: ignore[union-attr]
        loss.backward()
        state.optimizer.step()  # type: ignore[union-attr]
        arguments = (loss.detach(),) if isinstance(state.scheduler, lr_scheduler.ReduceLROnPlateau) else ()
        state.scheduler.step(*arguments)  # type: ignore[union-attr]
        state.others["average"].update_parameters(state.model)  # type: ignore[attr-defined]
        losses.append(loss.item().hex())
    return losses


@pytest.mark.filterwarnings("ignore:.*")
@cases("optimizer, scheduler", *((name, "step") for name in OPTIMIZERS), *(("AdamW", name) for name in SCHEDULERS))
def test_every_optimizer_and_scheduler_of_torch_resumes_bit_for_bit(
    tmp_path: Path, optimizer: str, scheduler: str
) -> None:
    state = _state(optimizer, scheduler)
    _train(state, 3)
    checkpointer = Checkpointer(tmp_path)
    result = checkpointer.save(3, state)
    assert result.committed, result.error
    expected, resumed = _train(state, 3), _state(optimizer, scheduler)
    assert Checkpointer(tmp_path).restore(resumed) == 3 and _train(resumed, 3) == expected
    for name, tensor in state.others["average"].state_dict().items():
        assert torch.equal(tensor, resumed.others["average"].state_dict()[name])
    shutil.rmtree(tmp_path)
