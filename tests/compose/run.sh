#!/bin/sh
# Build the image, run the stack of docker-compose.yml on a free port, check it, and take all of it away again.
set -eu
cd "$(dirname "$0")/../.."

: "${DOCKER:=docker}" "${COMPOSE:=docker-compose}" "${READY_S:=180}"
export DOCKER COMPOSE

if ! "$DOCKER" info >/dev/null 2>&1; then
    echo "no Docker engine answers: install one (Debian: apt-get install docker.io docker-compose), start it" >&2
    echo "(systemctl start docker), or name another by DOCKER_HOST; DOCKER and COMPOSE name other commands" >&2
    exit 1
fi

python=.venv/bin/python
test -x "$python" || python=python3

COMPOSE_PROJECT_NAME=tabrelay-test-$$
TABRELAY_PORT=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
TABRELAY_REDIS_PASSWORD=$("$python" -c 'import secrets; print(secrets.token_hex(16))')
export COMPOSE_PROJECT_NAME TABRELAY_PORT TABRELAY_REDIS_PASSWORD
unset TABRELAY_DATA_VOLUME

leave() {
    status=$?
    trap - EXIT INT TERM
    if [ "$status" -ne 0 ]; then
        $COMPOSE ps || true
        $COMPOSE logs --no-color --tail 60 || true
    fi
    $COMPOSE down --volumes --timeout 10 || status=1
    exit "$status"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# All services of ours run the one image.
$COMPOSE build api
$COMPOSE up -d
"$python" tests/compose/check.py --url "http://127.0.0.1:$TABRELAY_PORT" --ready-s "$READY_S"
