# An image for workers, and for heads, on Kubernetes: this checkout of clusterenv and what environments need.
#
#   docker build --tag rl:1 .
#   docker build --tag rl:1 --build-arg EXTRAS=kubernetes,torch,mujoco .
FROM python:3.11-slim
ARG EXTRAS=kubernetes
COPY pyproject.toml README.md LICENSE constraints.txt /clusterenv/
COPY scripts/package_metadata.py /clusterenv/scripts/
COPY src /clusterenv/src
RUN pip install --no-cache-dir --constraint /clusterenv/constraints.txt "/clusterenv[$EXTRAS]"
# Some namespaces run nothing as root.
RUN useradd --create-home --uid 1000 rl
USER 1000
WORKDIR /home/rl
