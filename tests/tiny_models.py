from helpers import (  # noqa: F401 - gone once no test imports it
    ANIMALS,
    SKIES,
    TREES,
    expert_config,
    logits,
    pictures,
    tiny_vit,
    trainable,
    weights,
    with_experts,
)
