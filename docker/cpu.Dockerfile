# The image for pods without a GPU: `docker build -f docker/cpu.Dockerfile .`
ARG PYTHON=3.11.14-slim-bookworm
# The base itself and not only its name, for all architectures; it changes with PYTHON (docs/deploy.md).
ARG DIGEST=@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM python:${PYTHON}${DIGEST} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/constraints.txt
RUN python -m venv /opt/holdfast
ENV PATH=/opt/holdfast/bin:$PATH
WORKDIR /src
# Dependencies first: they change less often than the code, and are most of the image.
COPY constraints.txt pyproject.toml docker/requirements.py ./
# torch's own index has a build without CUDA, a tenth of the size.
RUN python requirements.py > requirements.txt \
 && pip install --index-url https://download.pytorch.org/whl/cpu --no-deps torch \
 && pip install -r requirements.txt
COPY README.md setup.py ./
COPY kernels kernels
COPY replicas replicas
COPY router router
COPY cluster cluster
COPY loadgen loadgen
RUN pip install "setuptools>=80" && pip install --no-deps . && pip uninstall --yes pip
# What Ray is to start as HAProxy, so that it sees clients go.
RUN python -m holdfast.cluster.haproxy /opt/holdfast/bin/haproxy-unspliced

FROM python:${PYTHON}${DIGEST}
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/holdfast holdfast
COPY --from=build /opt/holdfast /opt/holdfast
# The operator starts containers through a login shell, which forgets PATH.
COPY docker/profile.sh /etc/profile.d/holdfast.sh
ENV PATH=/opt/holdfast/bin:$PATH \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/holdfast/bin/haproxy-unspliced \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/holdfast
CMD ["holdfast", "--help"]
