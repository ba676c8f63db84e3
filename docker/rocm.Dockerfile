# not built in our checks
#
# Undertow for AMD GPUs, gfx942 and gfx950. From the repository's root:
#   docker build -f docker/rocm.Dockerfile -t undertow:rocm .
#   docker run --rm --device=/dev/kfd --device=/dev/dri --group-add=video --security-opt=seccomp=unconfined \
#     --ipc=host --ulimit memlock=-1 --network=host --device=/dev/infiniband \
#     -v "$PWD/runs:/work/runs" undertow:rocm doctor
ARG BASE=rocm/dev-ubuntu-24.04:7.2-complete
FROM ${BASE}

# A release that pyproject.toml allows, and the index that has it for the ROCm of BASE.
ARG TORCH=2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2

# Triton compiles launchers with gcc and Python's headers; the ibverbs packages let RCCL see RDMA devices.
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
# Without the extra gpu: torch for ROCm brings a Triton of its own, which another one would overwrite.
RUN pip install --no-cache-dir ".[data]"

WORKDIR /work
ENTRYPOINT ["undertow"]
CMD ["doctor"]
