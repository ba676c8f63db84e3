# not built in our checks
#
# Undertow for NVIDIA GPUs from sm_90 on. From the repository's root:
#   docker build -f docker/cuda.Dockerfile -t undertow:cuda .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --network=host --device=/dev/infiniband \
#     -v "$PWD/runs:/work/runs" undertow:cuda doctor
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

# A release that pyproject.toml allows, and the index that has it for the CUDA of BASE.
ARG TORCH=2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130

# Triton compiles launchers with gcc and Python's headers; the ibverbs packages let NCCL see RDMA devices.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        gcc libc6-dev python3 python3-dev python3-venv libibverbs1 ibverbs-providers rdma-core \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/undertow
ENV PATH=${VIRTUAL_ENV}/bin:${PATH}
RUN python3 -m venv ${VIRTUAL_ENV} && pip install --no-cache-dir "torch==${TORCH}" --index-url ${TORCH_INDEX}

WORKDIR /src
COPY pyproject.toml README.md LICENSE THIRD_PARTY.md ./
COPY undertow ./undertow
COPY recipes ./recipes
RUN pip install --no-cache-dir ".[gpu,data]"

WORKDIR /work
ENTRYPOINT ["undertow"]
CMD ["doctor"]
