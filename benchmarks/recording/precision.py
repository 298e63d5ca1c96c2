"""The precisions in which baselines train, by the names that cells give them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """`weights`: torch's name of the type they are loaded in; `mixed`: products in bf16.

    `trained_bytes`: those of a trained parameter, as of its gradient and of each moment.
    """

    weights: str
    mixed: bool
    trained_bytes: int


PRECISIONS = {
    "fp32": Precision("float32", mixed=False, trained_bytes=4),
    "bf16": Precision("float32", mixed=True, trained_bytes=4),
    "bf16_weights": Precision("bfloat16", mixed=False, trained_bytes=2),
    # As LoRA is trained: PEFT keeps adapters in float32, whose products would be too.
    "bf16_frozen": Precision("bfloat16", mixed=True, trained_bytes=4),
}
