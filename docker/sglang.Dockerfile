# freedraft in SGLang's own GPU image. Build: make wheel && docker build -f docker/sglang.Dockerfile -t freedraft-sglang .
# Run: docker run --gpus all --shm-size 16g -p 30000:30000 freedraft-sglang --model-path MODEL
ARG SGLANG_VERSION=v0.5.23
FROM lmsysorg/sglang:${SGLANG_VERSION}

COPY dist/freedraft-*.whl /srv/install/
RUN python3 -m pip install --no-cache-dir /srv/install/freedraft-*.whl && rm -r /srv/install \
    && useradd --create-home --home-dir /srv/freedraft --uid 10001 freedraft
USER 10001
WORKDIR /srv/freedraft
ENV HF_HOME=/srv/freedraft/.cache/huggingface NUMBA_CACHE_DIR=/srv/freedraft/.cache/numba
EXPOSE 30000
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000", "--speculative-algorithm", "sssd"]
CMD ["--model-path", "Qwen/Qwen3-8B"]
