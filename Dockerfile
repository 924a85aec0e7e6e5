# One image for the API, fit workers and predict workers; docker-compose.yml says which one a container is.
FROM python:3.11-slim-bookworm

# Extra package index, such as https://download.pytorch.org/whl/cpu for a torch without CUDA.
ARG PIP_EXTRA_INDEX_URL

WORKDIR /app

# Libraries first, torch before all others: a change of code installs nothing again.
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0
COPY pyproject.toml ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['server'], sep='\n')" > /tmp/requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement /tmp/requirements.txt \
 && rm /tmp/requirements.txt

# A new volume takes owner and mode of the folder that it is mounted on.
RUN groupadd --gid 10001 tabrelay \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin tabrelay \
 && install --directory --owner=10001 --group=10001 --mode=0700 /data

# The source as it lies in the repository: the registry looks for checkpoints/ beside common/.
COPY . .
RUN python -m compileall -q api common fit_workers predict_workers tabrelay

ENV PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONHASHSEED=0 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    TABRELAY_DATA_DIR=/data
USER 10001:10001
CMD ["python", "-m", "api"]
