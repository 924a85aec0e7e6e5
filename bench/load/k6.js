// One-shot predicts under load: `k6 run -e URL=http://127.0.0.1:8000 -e PAUSE=1 bench/load/k6.js`.
// 10, then 25 virtual users; each sends a random table of 150 x 10 with 20 rows to answer, waits for the answer and pauses.
// `python -m bench.load` is the same without k6.
import http from 'k6/http';
import { check, sleep } from 'k6';

const URL = __ENV.URL || 'http://127.0.0.1:8000';
const PAUSE = Number(__ENV.PAUSE || 1);
const TRAIN = 150, ROWS = 20, COLUMNS = 10;

export const options = {
  stages: [
    { duration: '3s', target: 10 },
    { duration: '15s', target: 10 },
    { duration: '3s', target: 25 },
    { duration: '15s', target: 25 },
  ],
  thresholds: {
    http_req_failed: ['rate<0.01'],
    http_req_duration: ['p(95)<500'],
  },
};

function row() {
  return Array.from({ length: COLUMNS }, () => Math.random() * 2 - 1);
}

export default function () {
  const train = Array.from({ length: TRAIN }, row);
  const body = JSON.stringify({
    train_features: train,
    train_labels: train.map((values) => (values[0] + values[1] > 0 ? 'yes' : 'no')),
    eval_features: Array.from({ length: ROWS }, row),
  });
  const response = http.post(`${URL}/v1/predict`, body, { headers: { 'Content-Type': 'application/json' } });
  check(response, {
    'answered, or refused in words': (r) => r.status === 200 || r.status === 429,
    'one answer a row': (r) => r.status !== 200 || r.json('predictions').length === ROWS,
  });
  sleep(PAUSE);
}
