# An image with pat_jax and what JAX needs for one kind of accelerator. GPUs want the NVIDIA container
# toolkit on the host, and nothing of CUDA: its libraries are packages.
#
#   docker build -t pat_jax .                              CPU
#   docker build -t pat_jax --build-arg EXTRA=cuda12 .     GPUs with a driver of CUDA 12
#   docker build -t pat_jax --build-arg EXTRA=cuda13 .     … of CUDA 13
#   docker build -t pat_jax --build-arg EXTRA=tpu .        TPUs
#
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/workspace/runs" pat_jax pat_jax.train --model DIR …
FROM python:3.12-slim AS wheel
RUN pip install --no-cache-dir build
COPY . /source
RUN python -m build --quiet --wheel --outdir /wheel /source

FROM python:3.12-slim
ARG EXTRA=""
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/*.whl)${EXTRA:+[$EXTRA]}" && rm -r /wheel
# What is compiled once is found by the next container, if this is a volume.
ENV PAT_JAX_CACHE=/cache
WORKDIR /workspace
ENTRYPOINT ["python", "-m"]
CMD ["pat_jax.train"]
