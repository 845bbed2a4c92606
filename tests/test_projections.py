"""8-bit projections: real e4m3 codes and scales, in the layers that were asked for, and gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import TINY, build, llama, real_dims
from torch import nn

from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.projections import applied, layers_of, projections, quantised


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(hf: Any) -> Any:
    return real_dims(hf)


@pytest.mark.parametrize("weights", ["fp8", "fp8-weights"])
def test_every_projection_of_every_layer_has_e4m3_codes_and_a_scale_a_channel(model: Any, weights: str) -> None:
    packed = quantised(model, weights)

    assert {layer: set(names) for layer, names in packed.items()} == {
        layer: set(names) for layer, names in projections(model).items()
    }
    assert set(packed[0]) == {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    assert "self_attn.v_proj" not in packed[1]  # K is V there
    for layer, names in projections(model).items():
        for name, module in names.items():
            weight: Any = packed[layer][name]
            assert weight.qdata.dtype == torch.float8_e4m3fn and weight.scale.dtype == torch.float32
            assert weight.scale.shape == (module.out_features, 1)


def test_a_dequantised_weight_is_within_half_a_step_of_e4m3(model: Any) -> None:
    """A step is 2^-3 of the power of two below, or 2^-9 of a subnormal; the scale itself is rounded."""
    for layer, names in quantised(model, "fp8-weights").items():
        for name, packed in names.items():
            own = projections(model)[layer][name].weight.detach().double()
            weight: Any = packed
            codes, scale = weight.qdata.double(), weight.scale.double()
            step = torch.exp2(torch.floor(torch.log2(codes.abs().clamp(min=2.0**-6))) - 3)
            assert bool(((codes * scale - own).abs() <= (0.5 + 1e-5) * step * scale).all())


def test_weights_change_inside_and_are_the_models_own_after(model: Any) -> None:
    modules, packed = projections(model), quantised(model, "fp8")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with applied(modules, {1: packed[1]}):
        assert all(modules[1][name].weight is packed[1][name] for name in packed[1])
        assert all(type(module.weight.data) is torch.Tensor for module in modules[0].values())

    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_weights_are_the_models_own_after_an_error_too(model: Any) -> None:
    modules, packed = projections(model), quantised(model, "fp8")
    own = modules[0]["mlp.up_proj"].weight
    with pytest.raises(KeyError), applied(modules, packed):
        raise KeyError

    assert modules[0]["mlp.up_proj"].weight is own


def test_inputs_are_rounded_by_w8a8_and_kept_by_weight_only(model: Any) -> None:
    """At scale 1 (the largest input is 448), 17 is halfway between 16 and 18 in e4m3 and becomes 16; bf16 holds it."""
    modules = projections(model)
    x, rounded = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    x[0, :2], rounded[0, :2] = torch.tensor([448.0, 17.0]), torch.tensor([448.0, 16.0])
    same = {}
    for weights in ("fp8", "fp8-weights"):
        with applied(modules, quantised(model, weights)), torch.inference_mode():
            module = modules[0]["mlp.up_proj"]
            same[weights] = torch.equal(module(x), module(rounded))

    assert same == {"fp8": True, "fp8-weights": False}


def test_a_size_that_no_8_bit_product_takes_is_an_error(hf: Any) -> None:
    odd = build(hf, hf.LlamaConfig(**TINY | {"intermediate_size": 50}))
    with pytest.raises(
        CheckpointError, match=r"layer 0 mlp.gate_proj: its weight is \(50, 32\); 8-bit products take multiples of 16"
    ):
        quantised(odd, "fp8")


def test_a_model_without_layers_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="Linear: its decoder has no list of layers"):
        layers_of(nn.Linear(2, 2))


def test_a_llama_has_seven_projections_a_layer(hf: Any) -> None:
    assert [len(names) for names in projections(build(hf, llama(hf))).values()] == [7, 7]
