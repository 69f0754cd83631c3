"""The adapter to vLLM's model runner V1, `vllm.v1.worker.gpu_model_runner`."""
