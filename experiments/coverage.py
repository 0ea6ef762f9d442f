"""Which models of `transformers` can be trained: each, shrunk, against a loop over single examples in float64.

`python -m experiments run models` measures, `python -m experiments table models` prints the table of docs/models.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw
from clipwise.errors import ClipwiseError

WORDS, ROWS, LENGTH = 50, 3, 6
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SMALL, "vocab_size": WORDS}
FEW_KEYS = {**TEXT, "num_key_value_heads": 1}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _logits_loss(logits: Tensor, labels: Tensor) -> Tensor:
    found = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return found.view(len(labels), -1).mean(1)


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Sequence classification."""
    return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1], reduction="none")


def language(model: nn.Module, batch: Any) -> Tensor:
    """Next-word prediction."""
    return _logits_loss(model(input_ids=batch[0], use_cache=False).logits[:, :-1], batch[0][:, 1:])


def translate(model: nn.Module, batch: Any) -> Tensor:
    """Encoder and decoder."""
    return _logits_loss(model(input_ids=batch[0], decoder_input_ids=batch[0], use_cache=False).logits, batch[0])


def see(model: nn.Module, batch: Any) -> Tensor:
    """Image classification."""
    return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1], reduction="none")


def embed(model: nn.Module, batch: Any) -> Tensor:
    """An image tower."""
    found: Tensor = model(pixel_values=batch[0]).pooler_output
    return found.square().mean(1)


def hear(model: nn.Module, batch: Any) -> Tensor:
    """A sound encoder."""
    found: Tensor = model(input_values=batch[0]).last_hidden_state
    return found.square().mean((1, 2))


def transcribe(model: nn.Module, batch: Any) -> Tensor:
    """From sound to words."""
    return _logits_loss(model(input_features=batch[0], decoder_input_ids=batch[1], use_cache=False).logits, batch[1])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def text() -> tuple[Tensor, ...]:
    """Sentences and labels."""
    return torch.randint(4, WORDS, (ROWS, LENGTH), generator=_generator()), torch.arange(ROWS) % 2


def images() -> tuple[Tensor, ...]:
    """Pictures and labels."""
    return torch.randn(ROWS, 3, 16, 16, generator=_generator()), torch.arange(ROWS) % 2


def sound() -> tuple[Tensor, ...]:
    """Waves."""
    return (torch.randn(ROWS, 200, generator=_generator()),)


def spectra() -> tuple[Tensor, ...]:
    """Spectrograms and sentences."""
    return torch.randn(ROWS, 4, 20, generator=_generator()), text()[0]


Task = tuple[Callable[[nn.Module, Any], Tensor], Callable[[], tuple[Tensor, ...]]]
CLASSIFY, LANGUAGE, TRANSLATE = (classify, text), (language, text), (translate, text)
SEE: Task = (see, images)
PATCHES = {**SMALL, "image_size": 16, "patch_size": 8}
SIDES = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
WAVES = {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
STAGES = {"hidden_sizes": [4, 8], "depths": [1, 1]}

# name: (class, config class, config, task)
MODELS: dict[str, tuple[str, str, dict[str, Any], Task]] = {
    "Bert": ("BertForSequenceClassification", "BertConfig", TEXT, CLASSIFY),
    "Roberta": ("RobertaForSequenceClassification", "RobertaConfig", TEXT | {"max_position_embeddings": 40}, CLASSIFY),
    "DistilBert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": WORDS},
        CLASSIFY,
    ),
    "Albert": ("AlbertForSequenceClassification", "AlbertConfig", TEXT | {"embedding_size": 8}, CLASSIFY),
    "Electra": ("ElectraForSequenceClassification", "ElectraConfig", TEXT | {"embedding_size": 8}, CLASSIFY),
    "DebertaV2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 16},
        CLASSIFY,
    ),
    "MPNet": ("MPNetForSequenceClassification", "MPNetConfig", TEXT, CLASSIFY),
    "ModernBert": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        TEXT | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2},
        CLASSIFY,
    ),
    "XLNet": (
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
        CLASSIFY,
    ),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2}, LANGUAGE),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, LANGUAGE),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {k: v for k, v in TEXT.items() if k != "intermediate_size"} | {"ffn_dim": 24, "word_embed_proj_dim": 16},
        LANGUAGE,
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", FEW_KEYS, LANGUAGE),
    "Mistral": ("MistralForCausalLM", "MistralConfig", FEW_KEYS, LANGUAGE),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", FEW_KEYS, LANGUAGE),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", FEW_KEYS | {"head_dim": 8}, LANGUAGE),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", FEW_KEYS | {"head_dim": 8}, LANGUAGE),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", FEW_KEYS | {"head_dim": 8}, LANGUAGE),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", FEW_KEYS | SPECIAL, LANGUAGE),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {k: v for k, v in TEXT.items() if k != "intermediate_size"},
        LANGUAGE,
    ),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
        LANGUAGE,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        TRANSLATE,
    ),
    "Bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, **SIDES},
        TRANSLATE,
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        LANGUAGE,
    ),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", FEW_KEYS | {"num_local_experts": 4}, LANGUAGE),
    "ViT": ("ViTForImageClassification", "ViTConfig", PATCHES, SEE),
    "Beit": ("BeitForImageClassification", "BeitConfig", PATCHES | {"use_relative_position_bias": True}, SEE),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2},
        SEE,
    ),
    "ConvNext": ("ConvNextForImageClassification", "ConvNextConfig", STAGES | {"num_stages": 2, "patch_size": 2}, SEE),
    "ConvNextV2": (
        "ConvNextV2ForImageClassification", "ConvNextV2Config", STAGES | {"num_stages": 2, "patch_size": 2}, SEE,
    ),
    "Dinov2": ("Dinov2ForImageClassification", "Dinov2Config", PATCHES, SEE),
    "CLIP vision": ("CLIPVisionModel", "CLIPVisionConfig", PATCHES, (embed, images)),
    "Wav2Vec2": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        SMALL | WAVES | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False},
        (hear, sound),
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 4, **SIDES,
         "max_source_positions": 10, "max_target_positions": 20, "decoder_start_token_id": 1, **SPECIAL},
        (transcribe, spectra),
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        STAGES | {"embedding_size": 4, "layer_type": "basic"},
        SEE,
    ),
}  # fmt: skip
LORA = {"Bert": ["query", "value"], "GPT2": ["c_attn"], "Llama": ["q_proj", "v_proj"]}


def build(name: str, dropout: bool = False) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]:
    """Model (train mode, random weights, float64), loss and batch."""
    import transformers

    kind, config, numbers, (loss, data) = MODELS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, kind)(getattr(transformers, config)(**numbers)).train().double()
    if not dropout:
        for module in model.modules():
            for attribute, value in list(vars(module).items()):
                if isinstance(value, float) and ("drop" in attribute or attribute == "p"):
                    setattr(module, attribute, 0.0)
        for field, value in vars(model.config).items():
            if "drop" in field and isinstance(value, float):
                setattr(model.config, field, 0.0)
    return model, loss, tuple(x.double() if x.is_floating_point() else x for x in data())


def with_lora(name: str) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]:
    """The same, with adapters alone trainable."""
    import peft

    model, loss, data = build(name)
    config = peft.LoraConfig(r=2, target_modules=LORA[name], lora_dropout=0.0, fan_in_fan_out=name == "GPT2")
    adapted = peft.get_peft_model(model, config).double()
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_B" in key:  # zero at first, which would hide errors
                p.normal_(generator=_generator())
    return adapted, loss, data


def error(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], data: Any) -> dict[str, Any]:
    """Largest relative error of norms and sum against single examples, or why the model is refused."""
    try:
        out = cw.clipped_sum(model, loss, data, cw.AutoV())
    except ClipwiseError as refusal:
        return {"refused": f"{type(refusal).__name__}: {refusal}"}
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    worst = 0.0
    for i in range(ROWS):
        alone = loss(model, tuple(x[i : i + 1] for x in data))[0]
        grads = torch.autograd.grad(alone, list(parameters.values()), allow_unused=True)
        known = {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}
        norm = float(torch.cat([g.flatten() for g in known.values()]).norm())
        worst = max(worst, abs(float(out.norms[i]) / norm - 1))
        for n, g in known.items():
            total[n] += g / norm
    off = sum(float((out.grads[n] - total[n]).square().sum()) for n in total) ** 0.5
    size = sum(float(t.square().sum()) for t in total.values()) ** 0.5
    return {"norms": worst, "sum": off / size, "parameters": sum(p.numel() for p in parameters.values())}


def models() -> dict[str, Any]:
    """Every model, with adapters where there are, and ResNet with its batch norm replaced."""
    import transformers

    rows = {name: error(*build(name)) for name in MODELS}
    rows |= {f"{name} with LoRA": error(*with_lora(name)) for name in LORA}
    model, loss, data = build("ResNet")
    rows["ResNet after fix_batch_norm"] = error(cw.fix_batch_norm(model), loss, data)
    return {"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows}
