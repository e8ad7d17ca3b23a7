"""What a compiled program does, read from its optimised HLO.

The compiler's own figures count the body of a loop once; here it counts as often as
it runs, so that a scan over layers or micro-steps costs what it costs. All figures are
those of one device.

FLOPs are those of matrix products and convolutions, 2 per multiply-add, and of kernels
that state theirs. Collective bytes are those that a device receives in a ring:
(g − 1)/g of the whole array for a gather or a scatter, twice that for an all-reduce,
with g devices in a group.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

import numpy as np

from experiments import hlo_text

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)"?\}')
_INDEX = re.compile(r"index=(\d+)")
_KERNEL_FLOPS = re.compile(r'"?flops"?:\s*"?(\d+)"?')
# Matrix products per tile in the kernels of splash attention: scores and values; scores
# again, their gradient and that of the queries; the same for keys and values.
_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
# Neither computes nor moves anything in the main memory by itself.
_FREE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "partition-id",
        "replica-id",
        "iota",
        "opt-barrier",
        "add-dependency",
    )
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one device.

    Attributes:
      flops: of matrix products, convolutions and stated kernels.
      traffic: bytes that instructions read from and write to the main memory.
      collectives: kind → bytes received from other devices.
      uncounted_loops: loops whose number of rounds the program does not tell; their
        bodies count once.
      silent_kernels: calls, loops included, of kernels that do not state their FLOPs.
    """

    flops: float = 0.0
    traffic: float = 0.0
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)
    uncounted_loops: int = 0
    silent_kernels: int = 0

    @property
    def network(self) -> float:
        """Bytes of all collectives."""
        return sum(self.collectives.values())

    def __add__(self, other: Cost) -> Cost:
        total = collections.Counter(self.collectives)
        total.update(other.collectives)
        return Cost(
            self.flops + other.flops,
            self.traffic + other.traffic,
            dict(total),
            self.uncounted_loops + other.uncounted_loops,
            self.silent_kernels + other.silent_kernels,
        )

    def times(self, count: int) -> Cost:
        """The cost of `count` runs."""
        return Cost(
            self.flops * count,
            self.traffic * count,
            {kind: size * count for kind, size in self.collectives.items()},
            self.uncounted_loops,
            self.silent_kernels * count,
        )


def analyse(text: str, num_devices: int) -> Cost:
    """The cost of one run of a program.

    Args:
      text: optimised HLO, `compiled.as_text()`.
      num_devices: devices of the program, for groups that mean all of them.
    """
    return _Program(text, num_devices).entry_cost()


class _Program:
    def __init__(self, text: str, num_devices: int):
        self._num_devices = num_devices
        self._computations, self._entry = hlo_text.read(text)
        self._known: dict[str, Cost] = {}

    def entry_cost(self) -> Cost:
        return self._of(self._entry)

    def _of(self, name: str) -> Cost:
        if name not in self._known:
            body = self._computations.get(name, {})
            costs = (self._instruction(item, body, name) for item in body.values())
            self._known[name] = sum(costs, Cost())
        return self._known[name]

    def _instruction(
        self, item: hlo_text.Instruction, body: hlo_text.Computation, where: str
    ) -> Cost:
        opcode = item.opcode
        if opcode == "while":
            inside = self._of(item.callees["body"])
            trips = self._trip_count(item)
            if trips is None:
                return inside + Cost(uncounted_loops=1)
            return inside.times(trips)
        if opcode == "conditional":
            costs = map(self._of, hlo_text.branches(item))
            return max(costs, key=lambda cost: cost.flops, default=Cost())
        if opcode == "call":
            return self._of(item.callees["to_apply"])
        result = Cost(
            flops=_flops(item, body), traffic=self._traffic(item, body)
        ) + self._collective(item, body, where)
        if opcode == "custom-call" and "tpu_custom_call" in item.attributes:
            flops = _kernel_flops(item, body)
            result += Cost(silent_kernels=1) if flops is None else Cost(flops=flops)
        if "calls" in item.callees and not opcode.endswith(("-done", "-update")):
            # Inside a fusion nothing touches the main memory.
            result += dataclasses.replace(self._of(item.callees["calls"]), traffic=0.0)
        return result

    def _trip_count(self, item: hlo_text.Instruction) -> int | None:
        """As the compiler noted; else from a condition `counter < constant`.

        JAX's scans count from 0 by 1; loops that the compiler has unrolled, such as
        those of products whose operands travel around a ring, by more. Other loops
        (with a condition on values) run for a number of rounds that no program tells.
        """
        stated = _TRIPS.search(item.attributes)
        if stated:
            return int(stated[1])
        condition = self._computations.get(item.callees["condition"], {})
        root = next((part for part in condition.values() if part.is_root), None)
        if (
            root is None
            or root.opcode != "compare"
            or "direction=LT" not in (root.attributes)
        ):
            return None
        limit = condition.get(root.operands[1])
        if limit is None or limit.opcode != "constant":
            return None
        counter = _INDEX.search(condition[root.operands[0]].attributes)
        step = self._increment(item, int(counter[1])) if counter else 1
        return math.ceil(int(limit.attributes) / step)

    def _increment(self, loop: hlo_text.Instruction, index: int) -> int:
        """What a round adds to an element of the loop's state; 1 if it does not say."""
        body = self._computations.get(loop.callees["body"], {})
        root = next((part for part in body.values() if part.is_root), None)
        if root is None or root.opcode != "tuple":
            return 1
        part = body.get(root.operands[index])
        while part is not None and part.opcode == "copy":
            part = body.get(part.operands[0])
        if part is None or part.opcode != "add":
            return 1
        added = (body[name] for name in part.operands if name in body)
        constant = next((p for p in added if p.opcode == "constant"), None)
        return int(constant.attributes) if constant else 1

    def _collective(
        self, item: hlo_text.Instruction, body: hlo_text.Computation, where: str
    ) -> Cost:
        kind = item.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return Cost()
        if kind == "all-reduce" and "all-reduce-scatter" in where:
            kind = "reduce-scatter"  # TPU form: a fusion of all-reduce and slice
        size = sum(
            hlo_text.num_bytes(body[n].shape) for n in item.operands if n in body
        )
        group = hlo_text.group_size(item.attributes, self._num_devices)
        share = (group - 1) / group
        received = {
            "all-gather": size * (group - 1),
            "all-reduce": 2 * size * share,
            "collective-permute": size,
            "collective-broadcast": size,
        }.get(kind, size * share)
        return Cost(collectives={kind: received} if received else {})

    def _traffic(self, item: hlo_text.Instruction, body: hlo_text.Computation) -> float:
        opcode = item.opcode
        if opcode in _FREE or opcode.endswith("-done") or opcode == "async-update":
            return 0.0
        operands = [body[name] for name in item.operands if name in body]
        written = hlo_text.num_bytes(item.shape, main_memory=True)
        if opcode in ("dynamic-slice", "gather", "slice"):
            return 2.0 * written
        if opcode == "dynamic-update-slice":
            return 2.0 * hlo_text.num_bytes(operands[1].shape, main_memory=True)
        inside = self._computations.get(item.callees.get("calls", ""), {})
        if opcode == "fusion" and inside:
            return self._fusion_traffic(item, operands, inside)
        if opcode.endswith("-start"):
            written = 0  # its tuple repeats the operands
        return written + sum(
            hlo_text.num_bytes(o.shape, main_memory=True) for o in operands
        )

    def _fusion_traffic(
        self,
        item: hlo_text.Instruction,
        operands: list[hlo_text.Instruction],
        inside: hlo_text.Computation,
    ) -> float:
        """Of a fusion: slices of operands count as slices, updates as updates."""
        parameters = {
            int(found[1]): name
            for name, part in inside.items()
            if part.opcode == "parameter"
            and (found := re.match(r"(\d+)", part.attributes))
        }
        users = collections.defaultdict(list)
        for part in inside.values():
            for name in part.operands:
                users[name].append(part)
        total = 0.0
        for i, operand in enumerate(operands):
            size = hlo_text.num_bytes(operand.shape, main_memory=True)
            using = users.get(parameters.get(i, ""), [])
            sliced = [_slice_bytes(part, parameters[i], inside) for part in using]
            if size and using and all(s is not None for s in sliced):
                size = min(size, sum(s or 0 for s in sliced))
            total += size
        root = next((part for part in inside.values() if part.is_root), None)
        roots = [root] if root else []
        if root and root.opcode == "tuple":
            roots = [inside[name] for name in root.operands if name in inside]
        written = 0.0
        for part in roots:
            if part.opcode == "dynamic-update-slice" and part.operands[1] in inside:
                written += hlo_text.num_bytes(inside[part.operands[1]].shape)
            else:
                written += hlo_text.num_bytes(part.shape)
        return total + min(written, hlo_text.num_bytes(item.shape, main_memory=True))


def _slice_bytes(
    part: hlo_text.Instruction, name: str, inside: hlo_text.Computation
) -> int | None:
    """What a slice or update reads of its first operand; None for other uses."""
    if part.operands[:1] != (name,):
        return None
    if part.opcode in ("dynamic-slice", "slice", "gather"):
        return hlo_text.num_bytes(part.shape)
    if part.opcode == "dynamic-update-slice":
        return 0
    return None


def _flops(item: hlo_text.Instruction, body: hlo_text.Computation) -> float:
    if item.opcode not in ("dot", "convolution"):
        return 0.0
    left, right = (hlo_text.shape_dims(body[name].shape) for name in item.operands[:2])
    out = hlo_text.shape_dims(item.shape)
    if item.opcode == "convolution":
        return _convolution_flops(left, right, out, item.attributes)
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", item.attributes)
    contracted = hlo_text.numbers(found[1]) if found else []
    return 2.0 * math.prod(out) * math.prod(left[d] for d in contracted)


def _kernel_flops(
    item: hlo_text.Instruction, body: hlo_text.Computation
) -> float | None:
    """Of a Pallas kernel: as it states, or by the tiles of JAX's splash attention."""
    stated = _KERNEL_FLOPS.search(item.attributes)
    if stated:
        return float(stated[1])
    products = next((n for k, n in _SPLASH.items() if item.name.startswith(k)), None)
    shapes = [hlo_text.shape_dims(body[n].shape) for n in item.operands if n in body]
    queries = next((shape for shape in shapes if len(shape) == 4), None)
    if products is None or queries is None:
        return None
    batch, heads, length, width = queries
    # The first operands list the tiles, [1, n, n]; a causal mask skips the upper ones.
    tiles = next((s[2] for s in shapes if len(s) == 3 and s[0] == 1), 1)
    share = (tiles + 1) / (2 * tiles)
    return 2.0 * products * batch * heads * length * length * width * share


def _convolution_flops(
    left: list[int], right: list[int], out: list[int], attributes: str
) -> float:
    """2 × (input features × output features × batch) × valid window positions.

    TPUs write matrix products as convolutions, batch axes as spatial ones with padding
    and dilation, so that places outside the input must not count.
    """
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if not found:
        raise ValueError(f"convolution without dim_labels: {attributes}")
    left_labels, right_labels, out_labels = found.groups()
    fields = {
        name: text.split("x")
        for name, text in re.findall(r"(\w+)=([\w\-]+)", _window(attributes))
    }
    valid = 1
    for i, label in enumerate(sorted(c for c in left_labels if c.isdigit())):
        low = int(fields["pad"][i].split("_")[0]) if "pad" in fields else 0
        stride, grow, reach = (
            int(fields[name][i]) if name in fields else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        place = (
            np.arange(out[out_labels.index(label)])[:, None] * stride
            - low
            + np.arange(right[right_labels.index(label)])[None] * reach
        )
        size = left[left_labels.index(label)]
        valid *= int(
            np.sum((place >= 0) & (place % grow == 0) & (place // grow < size))
        )
    return (
        2.0
        * right[right_labels.index("i")]
        * out[out_labels.index("f")]
        * out[out_labels.index("b")]
        * valid
    )


def _window(attributes: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    return found[1] if found else ""
