"""GPUs that a dry run assumes: `--assume 2x8xA100-40GB` means two nodes of eight GPUs.

memory_gib: the memory that torch sees. bf16_tflops: the peak of dense products in bf16 with float32
sums. link_gb_s: GB/s between a GPU and the others of its node, sent plus received. The figures are
from NVIDIA's data sheets, without sparsity; for the RTX 3090, 4090 and 5090 from the white papers
of their architectures (PCIe 4 and 5: 64 and 128 GB/s). We compared the figures of A100, A40, H100,
H200, L4 and L40S with public lists that cite the data sheets, but not the figures of other GPUs.
"""

import re
from dataclasses import dataclass

# name: memory_gib, bf16_tflops, link_gb_s
GPUS = {
    "B200-180GB": (178.3, 2250, 1800),
    "H200-141GB": (139.8, 989, 900),
    "H100-80GB": (79.1, 989, 900),
    "H100-94GB": (93.1, 835, 600),
    "GH200-96GB": (94.5, 989, 900),
    "A100-80GB": (79.1, 312, 600),
    "A100-40GB": (39.4, 312, 600),
    "A30-24GB": (23.5, 165, 200),
    "A40-48GB": (44.4, 149.7, 64),
    "L40S-48GB": (44.4, 362, 64),
    "L4-24GB": (22.0, 121, 64),
    "RTXA6000-48GB": (47.4, 154.8, 64),
    "RTX6000Ada-48GB": (47.4, 364.2, 64),
    "RTX3090-24GB": (23.6, 71, 64),
    "RTX4090-24GB": (23.5, 165.2, 64),
    "RTX5090-32GB": (31.4, 209.5, 128),
}
# torch sees about this share of an unknown GPU's nominal memory.
VISIBLE_SHARE = 0.95
_FORM = re.compile(r"(?:(\d+)x)?(\d+)x(?:(\w[\w ]*)-)?(\d+)GB", re.IGNORECASE)


@dataclass(frozen=True)
class AssumedGpus:
    """The GPUs of a run: `nodes` nodes with `per_node` GPUs each.

    flops: peak FLOP per second of a GPU in bf16; None: not known. link: bytes per second that a GPU
    sends to the other GPUs of its node.
    """

    name: str
    nodes: int
    per_node: int
    memory_gib: float
    flops: float | None = None
    link: float | None = None

    @property
    def world_size(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.world_size} x {self.name}{nodes}"


def assumed_gpus(text: str) -> AssumedGpus:
    """Read `8xH100-80GB`, `2x8xA100-40GB`, or `8x48GB` for any GPU. Raises ValueError otherwise."""
    found = _FORM.fullmatch(text.strip())
    numbers = [int(each or 1) for each in found.groups()[:2]] if found else [0]
    if found is None or min(numbers) < 1 or int(found[4]) < 1:
        raise ValueError(
            "expected GPUs, or nodes x GPUs, as in 8xH100-80GB, 2x8xA100-40GB, or 8x48GB for any"
        )
    nodes, per_node = numbers
    if found[3] is None:
        return AssumedGpus(f"{found[4]}GB", nodes, per_node, int(found[4]) * VISIBLE_SHARE)
    asked = f"{found[3].replace(' ', '')}-{found[4]}GB"
    known = {name.lower(): name for name in GPUS}
    if asked.lower() not in known:
        raise ValueError(
            f"{asked} is not known here: take one of {', '.join(GPUS)}, or give its memory alone, "
            f"{text[: found.start(3)]}{found[4]}GB, for a prediction without speed"
        )
    name = known[asked.lower()]
    memory_gib, tflops, link_gb_s = GPUS[name]
    return AssumedGpus(name, nodes, per_node, memory_gib, tflops * 1e12, link_gb_s / 2 * 1e9)
