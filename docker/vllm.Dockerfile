# freedraft in vLLM's own GPU image. Build: make wheel && docker build -f docker/vllm.Dockerfile -t freedraft-vllm .
# Run: docker run --gpus all -p 8000:8000 freedraft-vllm --model MODEL
ARG VLLM_VERSION=v0.33.0
FROM vllm/vllm-openai:${VLLM_VERSION}

# The engine's own packages stay as they are: freedraft needs nothing newer.
COPY dist/freedraft-*.whl /srv/install/
RUN python3 -m pip install --no-cache-dir /srv/install/freedraft-*.whl && rm -r /srv/install \
    && useradd --create-home --home-dir /srv/freedraft --uid 10001 freedraft
USER 10001
WORKDIR /srv/freedraft
# Folders to mount volumes at, which that user may write.
RUN mkdir learnt .cache
# Compiled drafting code and models are kept here: mount it to keep them from one container to the next.
ENV HF_HOME=/srv/freedraft/.cache/huggingface NUMBA_CACHE_DIR=/srv/freedraft/.cache/numba
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve", "--host", "0.0.0.0", "--port", "8000", "--speculative-config", "{\"method\": \"sssd\"}"]
CMD ["--model", "Qwen/Qwen3-8B"]
