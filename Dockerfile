# The environment that Stoker runs in. The repository stays outside and is mounted:
#
#   docker build --build-arg UID="$(id -u)" --tag stoker .
#   docker run --rm -it --gpus all --ipc=host --volume "$PWD":/workspace stoker
#
# slurm/stoker.def makes the same for Apptainer. torch's wheel brings CUDA 13.0, so the host needs
# an NVIDIA driver of 580 or newer; nothing else of CUDA is installed.
FROM python:3.11.15-slim-bookworm

# g++: torch compiles layers (`--compile`); git: provenance.json names the commit.
# hadolint ignore=DL3008 # Debian keeps only the newest build of a version
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

COPY requirements.lock /opt/stoker/requirements.lock
RUN pip install --no-cache-dir --root-user-action=ignore --requirement /opt/stoker/requirements.lock

# Not root; with your own user id what a run writes is yours.
ARG UID=1000
RUN useradd --uid "$UID" --no-log-init --create-home stoker
USER $UID
# What lies in ~/.local must not replace the packages above.
ENV PYTHONNOUSERSITE=1
WORKDIR /workspace
CMD ["bash"]
