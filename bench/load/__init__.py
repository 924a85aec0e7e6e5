"""Does the service hold many users' one-shots? `python -m bench.load`, or `k6 run bench/load/k6.js`."""
