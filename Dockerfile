# relay in a container, by the lines of docs/install.md.
#
#   docker build -t relay --build-arg DEVICE=cpu .
#   docker run --rm -it --shm-size=2g -v "$PWD:/work" relay train --module sum_digits --config tiny
#
# With DEVICE=gpu the image has the CUDA 13 builds (driver 580 or newer): add `--gpus all` to `docker run`.
# `--cap-add SYS_ADMIN` lets relay give the actors a network of their own (docs/running.md).
FROM python:3.12-slim-bookworm

ARG DEVICE=cpu
# Triton compiles kernels on a GPU, one package of the extra `tasks` is compiled; vLLM needs libnuma and libgomp.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/relay
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --compile-bytecode --torch-backend "$([ "$DEVICE" = gpu ] && echo cu130 || echo cpu)" \
        "/opt/relay[$DEVICE,tinker,tasks,sinks]" \
    && python -c "import vllm, actors.controller"

WORKDIR /work
ENTRYPOINT ["relay"]
