"""Models of transformers, torchvision, timm and peft, tiny, with random weights, on uneven ranks.

The reference takes the same batches in one process, one after another, and steps with their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import chorusline as cl
from tests.real_models.libraries import can_import
from tests.real_models.optimizers import quietly

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, LEAST_STEPS = 64, 8, 2


def tokens(drawn: torch.Generator) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, LENGTH), generator=drawn)


def pictures(drawn: torch.Generator, side: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, side, side, generator=drawn)


def of_transformers(kind: str, config: str, **sizes: Any) -> torch.nn.Module:
    import transformers

    made: torch.nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    return made


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
"""Sizes that most configurations name so."""


def gpt2() -> torch.nn.Module:  # Its input and output embeddings are one parameter.
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 16}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return of_transformers("GPT2LMHeadModel", "GPT2Config", **sizes, **off)


def llama() -> torch.nn.Module:
    return of_transformers("LlamaForCausalLM", "LlamaConfig", intermediate_size=24, **SMALL)


def mixtral() -> torch.nn.Module:  # Some experts get no tokens.
    sizes = {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 1}
    return of_transformers(
        "MixtralForCausalLM", "MixtralConfig", intermediate_size=24, **sizes, **SMALL
    )


def bert() -> torch.nn.Module:  # The pooler is not used.
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = of_transformers("BertModel", "BertConfig", intermediate_size=24, **off, **SMALL)
    return _Hidden(model)


def t5() -> torch.nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    extra = {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return of_transformers("T5ForConditionalGeneration", "T5Config", **sizes, **extra)


def vit() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    image = {"image_size": 32, "patch_size": 8, "intermediate_size": 24, "num_labels": 3}
    return of_transformers("ViTForImageClassification", "ViTConfig", **sizes, **off, **image)


def lora() -> torch.nn.Module:  # All but the adapters are frozen.
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    made: torch.nn.Module = peft.get_peft_model(llama(), config)
    return made


def resnet() -> torch.nn.Module:
    import torchvision.models as models

    model: torch.nn.Module = models.resnet18(num_classes=3)
    for parameter in model.conv1.parameters():
        parameter.requires_grad_(False)
    return model


def mobilenet() -> torch.nn.Module:
    import torchvision.models as models

    model: torch.nn.Module = models.mobilenet_v3_small(num_classes=3, dropout=0.0)
    return model


def deeplab() -> torch.nn.Module:
    import torchvision.models.segmentation as models

    made = models.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3, aux_loss=True
    )
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return made


def convnext() -> torch.nn.Module:
    import timm

    made: torch.nn.Module = timm.create_model(
        "convnext_atto", num_classes=3, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)
    )
    return made


class _Hidden(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(numbers).last_hidden_state
        return hidden


def language_loss(model: torch.nn.Module, drawn: torch.Generator) -> torch.Tensor:
    numbers = tokens(drawn)
    loss: torch.Tensor = model(input_ids=numbers, labels=numbers).loss
    return loss


def hidden_loss(model: torch.nn.Module, drawn: torch.Generator) -> torch.Tensor:
    loss: torch.Tensor = model(tokens(drawn)).square().mean()
    return loss


def picture_loss(model: torch.nn.Module, drawn: torch.Generator) -> torch.Tensor:
    output = model(pictures(drawn))
    scores = getattr(output, "logits", output)
    return torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2]))


def segment_loss(model: torch.nn.Module, drawn: torch.Generator) -> torch.Tensor:
    output = model(pictures(drawn, 64))
    loss: torch.Tensor = output["out"].square().mean() + 0.4 * output["aux"].square().mean()
    return loss


MODELS: dict[str, tuple[str, Callable[[], torch.nn.Module], Callable[..., torch.Tensor]]] = {
    "gpt2": ("transformers", gpt2, language_loss),
    "llama": ("transformers", llama, language_loss),
    "mixtral": ("transformers", mixtral, language_loss),
    "bert": ("transformers", bert, hidden_loss),
    "t5": ("transformers", t5, language_loss),
    "vit": ("transformers", vit, picture_loss),
    "lora": ("peft", lora, language_loss),
    "resnet": ("torchvision", resnet, picture_loss),
    "mobilenet": ("torchvision", mobilenet, picture_loss),
    "deeplab": ("torchvision", deeplab, segment_loss),
    "convnext": ("timm", convnext, picture_loss),
}


def train(group: cl.Group | None, name: str, size: int, how: str) -> list[torch.Tensor]:
    """The parameters after the last step. Rank r has LEAST_STEPS + r batches."""
    library, make, loss_of = MODELS[name]
    assert can_import(library)
    torch.manual_seed(0)
    with quietly():
        module = make().train()
    trainable = [p for p in module.parameters() if p.requires_grad]
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9}
    optimizer: Any = torch.optim.SGD(trainable, **options)

    def drawn(rank: int, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(100 * step + rank)

    if group is None:
        for step in range(LEAST_STEPS + size - 1):
            live = [rank for rank in range(size) if step < LEAST_STEPS + rank]
            optimizer.zero_grad()
            for rank in live:
                loss_of(module, drawn(rank, step)).backward()
            for parameter in trainable:
                if parameter.grad is not None:
                    parameter.grad /= len(live)
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]
    # Normalisation layers take their statistics from each batch, and none of the other ranks'.
    model = cl.DistributedDataParallel(module, group)
    joined: list[Any] = [model]
    if how == "zero":
        optimizer = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, **options)
        joined.append(optimizer)
    with cl.Join(joined, skew_warning=None, divide_by_initial_world_size=False):
        for step in range(LEAST_STEPS + group.rank):
            loss_of(model, drawn(group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


def train_alone(_: cl.Group, *args: Any) -> list[torch.Tensor]:
    return train(None, *args)


@pytest.mark.parametrize("how", ["plain", "zero"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_uneven_ranks_as_in_one_process(ranks_of, name, size, how):
    library = MODELS[name][0]
    if not can_import(library):
        pytest.skip(f"{library} is not installed")
    [expected] = ranks_of(1).run(train_alone, name, size, how)
    found = ranks_of(size).run(train, name, size, how)
    for parameters in found:
        assert all(map(torch.equal, parameters, found[0])), "the ranks differ"
    if size == 2:  # A sum of two has one order.
        assert all(map(torch.equal, found[0], expected))
    for ours, theirs in zip(found[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
