"""The most tokens a second that a device could train, from what its probes reached.

A step is taken as a row of parts, each at the speed of its own limit, with no gap between them and
nothing recomputed: products with weights, attention (half the model FLOPs of its convention: the
causal half), what goes through memory elementwise, the loss, and AdamW. The shares of the matrix
peak are those of published H100 measurements:

- products as they occur in training reach 720 of 794 TFLOP/s (ml-engineering, MAMF tables), and
  0.85 of that with states of 1,024 or less, whose products are small;
- attention, both passes: FlashAttention 2 reaches 330, cuDNN and FlashAttention 3 560 of 794
  (tritonbench#97, pytorch#128888).
"""

from dataclasses import dataclass

from benchmarks.hardware.flops import ModelSize

PRODUCTS = 720 / 794.5
SMALL_HIDDEN, SMALL_PRODUCTS = 1024, 0.85
ATTENTION = {"FlashAttention 2": 330 / 794.5, "cuDNN, FlashAttention 3": 560 / 794.5}
# Bytes a parameter and step of AdamW, in float32: reading weight, gradient and both moments,
# writing all but the gradient, and once more the gradient for its norm and its clearing.
ADAMW_FLOAT32_BYTES = 38


@dataclass(frozen=True)
class Peaks:
    """The probed peaks: FLOP/s of bf16 products, bytes/s of a copy (read and written)."""

    matmul: float
    bandwidth: float


@dataclass(frozen=True)
class StepWork:
    """The tokens of a step, how many each sees, and the bytes of a parameter."""

    tokens: int
    effective_length: float
    parameter_bytes: int = 4


def seconds_per_token(
    size: ModelSize, work: StepWork, peaks: Peaks, attention: str
) -> dict[str, float]:
    """Return the seconds a token of each part; `attention` is a key of ATTENTION."""
    products = PRODUCTS * (SMALL_PRODUCTS if size.hidden <= SMALL_HIDDEN else 1.0)
    elementwise_bytes = 2 * size.layers * (34 * size.hidden + 12 * size.inner)
    adamw_bytes = ADAMW_FLOAT32_BYTES * work.parameter_bytes / 4 * size.trained / work.tokens
    causal_flops = size.attention_flops(work.effective_length) / 2
    return {
        "products": size.linear_flops() / (peaks.matmul * products),
        "attention": causal_flops / (peaks.matmul * ATTENTION[attention]),
        "elementwise": elementwise_bytes / peaks.bandwidth,
        "loss": 10 * size.vocabulary / peaks.bandwidth,
        "optimizer": adamw_bytes / peaks.bandwidth,
    }


def tokens_per_second(size: ModelSize, work: StepWork, peaks: Peaks) -> dict[str, float]:
    """Return the bound for each kind of attention kernel."""
    return {
        kind: 1 / sum(seconds_per_token(size, work, peaks, kind).values()) for kind in ATTENTION
    }
