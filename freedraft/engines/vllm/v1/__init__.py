"""The seam to vLLM's first model runner, `vllm.v1.worker.gpu_model_runner`."""
