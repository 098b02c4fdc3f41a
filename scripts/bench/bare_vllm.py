"""One bare vLLM start in this process, to its first token: what the quickstart is held against.

No log-probability is asked for: vLLM compiles a function for the first such request, seconds that are not its start.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python scripts/bench/bare_vllm.py MODEL MAX_MODEL_LEN KV_CACHE_BYTES

Prints one JSON object as soon as the token is there: CPU seconds of this process and its ended children so far.
"""

from __future__ import annotations

import json
import os
import sys


def main(model: str, max_model_len: str, kv_cache_bytes: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=int(max_model_len),
        kv_cache_memory_bytes=int(kv_cache_bytes),
        enforce_eager=True,
    )
    [output] = llm.generate("Sort: 52413\n", SamplingParams(max_tokens=1), use_tqdm=False)
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    print(json.dumps({"cpu_s": round(cpu_s, 2), "tokens": len(output.outputs[0].token_ids)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
