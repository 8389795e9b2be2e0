"""MPI ping-pong and all-reduce through the library of Open MPI itself, without a compiler on the nodes.

Open MPI's handles are addresses of symbols in its library. Those of MPICH are numbers: with it this does not work.
"""

from __future__ import annotations

import array
import ctypes
import time
from typing import Any, Dict, List

from .place import MissingTool, Rank, emit, library_beside, rounds, size_row

LIBRARIES = ("libmpi.so.40", "libmpi.so")
NAME_BYTES = 256
IN_PLACE = 1
"""MPI_IN_PLACE of Open MPI, as an address."""
LATENCY_ROUNDS = 100
WARM_UP_ROUNDS = 5
PAIR_BYTES = 1 << 20


class OpenMpi:
    """The few functions of MPI that the tests need. An error of MPI aborts the job, as in any MPI program."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.world = self._handle("ompi_mpi_comm_world")
        self.byte = self._handle("ompi_mpi_byte")
        self.float = self._handle("ompi_mpi_float")
        self.sum = self._handle("ompi_mpi_op_sum")
        self._call("MPI_Init", None, None)
        self.rank, self.size = self._number("MPI_Comm_rank"), self._number("MPI_Comm_size")

    @classmethod
    def load(cls) -> OpenMpi:
        try:
            library = ctypes.CDLL(library_beside("mpirun", LIBRARIES), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise MissingTool("the library of Open MPI (%s)" % error, "openmpi-bin") from None
        if not hasattr(library, "ompi_mpi_comm_world"):
            raise MissingTool("the library of Open MPI: this one is another MPI", "openmpi-bin")
        return cls(library)

    def barrier(self) -> None:
        self._call("MPI_Barrier", self.world)

    def all_reduce(self, values: Any, count: int) -> None:
        self._call("MPI_Allreduce", ctypes.c_void_p(IN_PLACE), values, count, self.float, self.sum, self.world)

    def send(self, data: Any, size: int, target: int) -> None:
        self._call("MPI_Send", data, size, self.byte, target, 0, self.world)

    def receive(self, data: Any, size: int, source: int) -> None:
        self._call("MPI_Recv", data, size, self.byte, source, 0, self.world, None)

    def gather_names(self, name: str) -> List[str]:
        """The node of every rank."""
        own = ctypes.create_string_buffer(name.encode()[: NAME_BYTES - 1], NAME_BYTES)
        names = ctypes.create_string_buffer(NAME_BYTES * self.size)
        self._call("MPI_Allgather", own, NAME_BYTES, self.byte, names, NAME_BYTES, self.byte, self.world)
        parts = [names.raw[place * NAME_BYTES : (place + 1) * NAME_BYTES] for place in range(self.size)]
        return [part.split(b"\0", 1)[0].decode() for part in parts]

    def finish(self) -> None:
        self._call("MPI_Finalize")

    def _handle(self, name: str) -> Any:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._library, name)))

    def _number(self, function: str) -> int:
        value = ctypes.c_int()
        self._call(function, self.world, ctypes.byref(value))
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError("%s failed with error %d" % (name, status))


def measure_mpi(rank: Rank, options: Dict[str, Any]) -> None:
    """The rows `mpi all-reduce` and `mpi ping-pong`."""
    mpi = OpenMpi.load()
    if mpi.size != rank.world:
        # Each process is a world of its own where the launcher and the library do not speak the same PMIx.
        raise RuntimeError(
            "MPI has %d ranks and the launcher started %d: mpirun or Slurm's PMIx and this libmpi do not fit together"
            % (mpi.size, rank.world)
        )
    nodes = mpi.gather_names(rank.node)
    sizes = [measure_size(mpi, size, int(options["iterations"])) for size in options["sizes"]]
    if mpi.rank == 0:
        emit(rank, "mpi", sizes=sizes, ranks=mpi.size, nodes=sorted(set(nodes)))
    measure_pairs(mpi, rank, nodes, int(options["iterations"]))
    mpi.finish()


def measure_size(mpi: OpenMpi, size: int, iterations: int) -> Dict[str, Any]:
    count = size // 4
    initial = array.array("f", [mpi.rank + 1.0]) * count
    values = (ctypes.c_float * count).from_buffer(array.array("f", initial))
    mpi.all_reduce(values, count)
    expected = array.array("f", [mpi.size * (mpi.size + 1) / 2.0]) * count
    wrong = 0 if bytes(values) == expected.tobytes() else sum(a != b for a, b in zip(values, expected))
    mpi.barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        mpi.all_reduce(values, count)
    seconds = (time.perf_counter() - begin) / iterations
    return size_row(size, seconds, mpi.size, wrong)


def measure_pairs(mpi: OpenMpi, rank: Rank, nodes: List[str], iterations: int) -> None:
    """Ping-pong between the first ranks of every two nodes; the other nodes wait meanwhile, or are in other pairs."""
    names = list(dict.fromkeys(nodes))
    for pairs in rounds(names):
        mpi.barrier()
        for first, second in pairs:
            source, target = nodes.index(first), nodes.index(second)
            if mpi.rank in (source, target):
                other = target if mpi.rank == source else source
                latency = ping_pong(mpi, 8, LATENCY_ROUNDS, mpi.rank == source, other)
                seconds = ping_pong(mpi, PAIR_BYTES, max(iterations, 10), mpi.rank == source, other)
                if mpi.rank == source:
                    speed = PAIR_BYTES / seconds / 1e9
                    emit(rank, "mpi-pair", pair=[first, second], latency_us=latency * 1e6, speed=speed)
    mpi.barrier()


def ping_pong(mpi: OpenMpi, size: int, iterations: int, first: bool, other: int) -> float:
    """Seconds of one way."""
    data = ctypes.create_string_buffer(size)
    begin = 0.0
    for turn in range(WARM_UP_ROUNDS + iterations):
        if turn == WARM_UP_ROUNDS:
            begin = time.perf_counter()
        if first:
            mpi.send(data, size, other)
            mpi.receive(data, size, other)
        else:
            mpi.receive(data, size, other)
            mpi.send(data, size, other)
    return (time.perf_counter() - begin) / iterations / 2
