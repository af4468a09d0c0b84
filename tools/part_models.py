"""Save the models that slower tests run against: two tiny random ones, and two real ones from GGUF files.

`parts.py` starts this file with a Python that has torch and transformers. It imports nothing else from this repository.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ModelError(Exception):
    """A model was not saved as expected."""


def _check_vllm() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ModelError(f"vLLM detected the device {current_platform.device_name} instead of a CPU")


def _save_smollm2(gguf: Path, new: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    del source.config.quantization_config  # the weights are now float32, and loading would fail with this setting
    model = LlamaForCausalLM(source.config)
    model.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(new)
    _save_smollm2_tokenizer(tokenizer, new)
    _try_smollm2(new)


def _save_smollm2_tokenizer(tokenizer: PreTrainedTokenizerFast, new: Path) -> None:
    """Write the tokenizer as the model's authors did.

    Their tokenizer first splits off every digit. The GGUF file records this only as the type "smollm", which transformers ignores. Without
    this rule, spaces before digits would be tokenized differently.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    backend["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    backend["post_processor"] = None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that uses tokenizer.json unchanged
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
    }
    (new / "tokenizer.json").write_text(json.dumps(backend, ensure_ascii=False))
    (new / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2))


def _try_smollm2(new: Path) -> None:
    """Load the saved model and tokenizer, and check that they work as expected."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(new)
    for text in ("Hello world", "a\n\n  12345 b\t", "日本語 émoji 🎉", "<|im_start|>user\nx<|im_end|>"):
        if tokenizer.decode(tokenizer.encode(text)) != text:
            raise ModelError(f"the saved tokenizer does not decode {text!r} to the same text")
    if tokenizer.tokenize("\n\n12") != ["ĊĊ", "1", "2"] or tokenizer.eos_token != "<|im_end|>":
        raise ModelError("the saved tokenizer does not split off digits first, or its end token is not <|im_end|>")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(new)
    answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=16, do_sample=False)[0])
    if not answer.endswith("Paris.<|im_end|>"):
        raise ModelError(f"the saved model does not know the capital of France: {answer!r}")


_CODER_TENSORS = {
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _save_coder(gguf: Path, new: Path) -> None:
    """Convert the GGUF file to a model folder. `new` already contains the tokenizer, and the chat template is taken from the file.

    The embedding and the output layer of this model share one matrix. Of the file's two copies, the more precise one (Q6_K) is used.
    """
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    _save_coder_settings({name: field.contents() for name, field in reader.fields.items()}, new)
    tensors = [tensor for tensor in reader.tensors if tensor.name != "token_embd.weight"]
    with ThreadPoolExecutor() as threads:
        values = threads.map(
            lambda one: torch.tensor(dequantize(one.data, one.tensor_type), dtype=torch.bfloat16), tensors
        )
        weights = {_name_coder_tensor(one.name): value for one, value in zip(tensors, values, strict=True)}
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})


def _name_coder_tensor(name: str) -> str:
    """Return a tensor's name in a Hugging Face folder: `blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`."""
    if name == "output.weight":
        return "model.embed_tokens.weight"
    layer, (part, kind) = "", name.split(".")[-2:]
    if name.startswith("blk."):
        layer = f"model.layers.{name.split('.')[1]}."
    return f"{layer}{_CODER_TENSORS[part]}.{kind}"


def _save_coder_settings(known: dict[str, Any], new: Path) -> None:
    """Write config.json and generation_config.json, and put the chat template into the tokenizer's settings."""
    begin, end = known["tokenizer.ggml.bos_token_id"], known["tokenizer.ggml.eos_token_id"]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(known["tokenizer.ggml.tokens"]),
        "hidden_size": known["qwen2.embedding_length"],
        "intermediate_size": known["qwen2.feed_forward_length"],
        "num_hidden_layers": known["qwen2.block_count"],
        "num_attention_heads": known["qwen2.attention.head_count"],
        "num_key_value_heads": known["qwen2.attention.head_count_kv"],
        "max_position_embeddings": known["qwen2.context_length"],
        "rms_norm_eps": 1e-6,  # the file contains it rounded to float32
        "rope_theta": known["qwen2.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": begin,
        "eos_token_id": end,
    }
    generation = {"bos_token_id": begin, "eos_token_id": [end, begin], "pad_token_id": begin}
    tokenizer = json.loads((new / "tokenizer_config.json").read_text()) | {
        "chat_template": known["tokenizer.chat_template"]
    }
    words = json.loads((new / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"] | {one["content"]: one["id"] for one in words["added_tokens"]}
    if wrong := [word for word, at in vocabulary.items() if known["tokenizer.ggml.tokens"][at] != word]:
        raise ModelError(f"the tokenizer and the GGUF file differ in {len(wrong)} tokens, such as {wrong[0]!r}")
    for file, content in (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer)):
        (new / f"{file}.json").write_text(json.dumps(content, ensure_ascii=False, indent=2))


def _save_tiny_qwen3(new: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _save_random(Qwen3ForCausalLM, Qwen3Config(**_TINY_QWEN3), new)


def _save_tiny_qwen3_moe(new: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    shape |= {
        "tie_word_embeddings": False
    }  # SGLang does not support tied embeddings for this class: all logits would be 0
    _save_random(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_TINY_QWEN3 | shape), new)


_IM_END, _END_OF_TEXT = 151645, 151643
_TINY_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest size that vLLM's CPU attention supports
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": _END_OF_TEXT,
    "eos_token_id": _IM_END,
    # With the usual 0.02, all 151936 ids are about equally likely. With much more, tied embeddings repeat the last id.
    "initializer_range": 0.1,
}


def _save_random(model_class: Any, config: Any, new: Path) -> None:
    """Save a model of this class with random weights, which are the same every time."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(0)
    model = model_class(config)
    model.generation_config = GenerationConfig(
        bos_token_id=_END_OF_TEXT, eos_token_id=[_IM_END, _END_OF_TEXT], pad_token_id=_END_OF_TEXT
    )
    model.save_pretrained(new)


TASKS: dict[str, Callable[..., None]] = {
    "check": _check_vllm,
    "smollm2": _save_smollm2,
    "coder": _save_coder,
    "tiny-qwen3": _save_tiny_qwen3,
    "tiny-qwen3-moe": _save_tiny_qwen3_moe,
}


if __name__ == "__main__":
    TASKS[sys.argv[1]](*map(Path, sys.argv[2:]))
