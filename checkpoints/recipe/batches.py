"""Training batches: draws from the pool, varied, and a cheap vectorised prior beside it.

The pool holds a few thousand tables; each draw takes other rows and other columns, may promote a column to the
target, cuts a numeric target into classes and renames the classes. The cheap prior (Gaussian classes, linear
targets, small random networks) costs almost nothing and fills the rest.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from prior import Table
from torch import Tensor

MAX_CLASSES = 10
MAX_COLUMNS = 40
SHORT_ROWS = (64, 96, 128, 192, 256)
LONG_ROWS = (384, 512)
# A long table costs as much as five short ones, so it comes up sometimes only.
LONG_SHARE = 0.12
# Cells to a batch, about a third of a second a step on one core. A row costs as much as its columns and some
# six more: four class tokens and its place in the context.
CELLS = 9000
ROW_COST = 6
CLASS_COUNT_WEIGHTS = (10, 6, 4, 2, 2, 1, 1, 1, 2)  # of 2, 3, ... 10 classes


@dataclass(frozen=True)
class Batch:
    """Tables of one shape: `features` (tables, rows, columns), `target` (tables, rows).

    The first `context_rows` rows of each table are the context, the others are to be predicted. Features (and
    numeric targets) are scaled by the context rows alone, as at inference.
    """

    features: Tensor
    target: Tensor
    context_rows: int


@dataclass(frozen=True)
class Shape:
    tables: int
    rows: int
    columns: int
    context_rows: int


def log_uniform(low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


def draw_shape() -> Shape:
    rows = random.choice(LONG_ROWS if random.random() < LONG_SHARE else SHORT_ROWS)
    columns = round(log_uniform(2, MAX_COLUMNS))
    tables = max(2, min(24, CELLS // (rows * (columns + ROW_COST))))
    return Shape(tables, rows, columns, int(rows * random.uniform(0.3, 0.9)))


def draw_class_count() -> int:
    return random.choices(range(2, MAX_CLASSES + 1), weights=CLASS_COUNT_WEIGHTS)[0]


def activate(values: Tensor) -> Tensor:
    kind = random.randrange(6)
    if kind == 0:
        return values.tanh()
    if kind == 1:
        return values.relu()
    if kind == 2:
        return values.sin()
    if kind == 3:
        return values.abs()
    if kind == 4:
        return values.sign() * values.abs().sqrt()
    return values


def sparse_weights(tables: int, inputs: int, outputs: int, least: float) -> Tensor:
    """Normal weights of which a random share, `least` at the least, is kept."""
    keep = random.uniform(least, 1)
    return torch.randn(tables, inputs, outputs) * (torch.rand(tables, inputs, outputs) < keep)


def gaussian_classes(shape: Shape) -> tuple[Tensor, Tensor]:
    """Classes as Gaussian clouds that share one covariance; the target is the class id."""
    b, t, h = shape.tables, shape.rows, shape.columns
    classes = draw_class_count()
    separation = log_uniform(0.4, 3.3)
    informative = torch.rand(b, 1, h) < random.uniform(0.2, 1)
    centres = torch.randn(b, classes, h) * separation * informative
    shares = torch.distributions.Dirichlet(torch.full((classes,), 2.0)).sample((b,))
    target = torch.multinomial(shares, t, replacement=True)
    mixing = torch.randn(b, h, h) / math.sqrt(h) * random.uniform(0, 1.5) + torch.eye(h)
    features = centres.gather(1, target[..., None].expand(-1, -1, h)) + torch.randn(b, t, h) @ mixing
    if random.random() < 0.3:
        features = (features.clamp(-4, 4) * 0.5).exp()
    return features, target


def linear_targets(shape: Shape) -> tuple[Tensor, Tensor]:
    """A sparse linear target of correlated columns: what a table of measurements most often is."""
    b, t, h = shape.tables, shape.rows, shape.columns
    mixing = torch.randn(b, h, h) / math.sqrt(h) * random.choice([0.0, 0.5, 1.5]) + torch.eye(h)
    features = torch.randn(b, t, h) @ mixing
    target = (features @ sparse_weights(b, h, 1, 0.2))[..., 0]
    noise = random.choice([0.02, 0.1, 0.3, 1.0])
    return features, target + torch.randn_like(target) * target.std(1, keepdim=True) * noise


def latent_inputs(shape: Shape) -> Tensor:
    """Hidden causes: normal or uniform, sometimes in five clusters."""
    b, t, width = shape.tables, shape.rows, random.randint(2, 12)
    latent = torch.randn(b, t, width) if random.random() < 0.6 else torch.rand(b, t, width) * 3.4 - 1.7
    if random.random() < 0.3:
        centres = torch.randn(b, 5, width) * 2
        member = torch.randint(0, 5, (b, t, 1)).expand(-1, -1, width)
        latent = 0.5 * latent + centres.gather(1, member)
    return latent


def network_targets(shape: Shape) -> tuple[Tensor, Tensor]:
    """Columns and target as two small random networks of the same hidden causes."""
    b, h = shape.tables, shape.columns
    latent = latent_inputs(shape)
    width = latent.shape[-1]
    hidden = latent @ (sparse_weights(b, width, 2 * h, 0.3) / math.sqrt(width))
    hidden = activate(hidden * random.uniform(0.5, 2.0) + torch.randn(b, 1, 2 * h) * 0.5)
    if random.random() < 0.5:
        mixed = random.random() < 0.5
        features = hidden @ (torch.randn(b, 2 * h, h) / math.sqrt(2 * h)) if mixed else hidden[..., :h]
        causes = latent if random.random() < 0.5 else hidden
    else:
        features = latent @ (torch.randn(b, width, h) / math.sqrt(width))
        causes = features if random.random() < 0.6 else latent
    score = causes @ sparse_weights(b, causes.shape[-1], 8, 0.2) / math.sqrt(causes.shape[-1])
    for _ in range(random.randint(0, 2)):
        bent = activate(score * 1.5 + torch.randn(b, 1, 8) * 0.5)
        score = bent @ (torch.randn(b, 8, 8) / math.sqrt(8)) + 0.3 * score
    features = features + torch.randn_like(features) * features.std() * random.choice([0, 0, 0.05, 0.3, 1.0])
    target = score[..., 0]
    noise = random.choice([0, 0.05, 0.2, 0.5])
    return features, target + torch.randn_like(target) * target.std(1, keepdim=True) * noise


def cut_into_classes(values: Tensor, classes: int) -> Tensor:
    """Class ids from a numeric target, by quantiles; at times a class is several separate intervals."""
    values = values.contiguous()
    levels = torch.unique(values)
    if len(levels) <= classes + 2:
        return torch.searchsorted(levels, values)
    if classes > 2 and random.random() < 0.5:
        cuts = torch.quantile(values, torch.rand(2 * classes).sort()[0])
        return torch.randint(0, classes, (2 * classes + 1,))[torch.searchsorted(cuts, values)]
    if random.random() < 0.4:
        at = torch.rand(classes - 1).sort()[0]
    else:
        at = torch.arange(1, classes) / classes + (torch.rand(classes - 1) - 0.5) * 0.5 / classes
    return torch.searchsorted(torch.quantile(values, at.clamp(0.03, 0.97)), values)


def finish_classes(target: Tensor, context_rows: int) -> Tensor | None:
    """Ids 0 to k-1 in random order, or None where the context lacks a class that is asked for."""
    known = torch.unique(target[:context_rows])
    if not 2 <= len(known) <= MAX_CLASSES or not bool(torch.isin(target[context_rows:], known).all()):
        return None
    return torch.randperm(len(known))[torch.searchsorted(known, target)].float()


def cheap_tables(shape: Shape, regression: bool) -> list[tuple[Tensor, Tensor]]:
    """Tables of the cheap prior with finished targets; a table whose classes do not work out is left out."""
    kind = random.random()
    numeric = kind >= 0.3
    if not numeric:
        features, target = gaussian_classes(shape)
        if regression:
            target = torch.randn(MAX_CLASSES)[target] + features[..., 0]
    elif kind < 0.45:
        features, target = linear_targets(shape)
    else:
        features, target = network_targets(shape)
    tables = []
    for x, y in zip(features, target, strict=True):
        if not regression:
            y = finish_classes(cut_into_classes(y, draw_class_count()) if numeric else y, shape.context_rows)
        if y is not None:
            tables.append((x, y))
    return tables


def vary(table: Table, shape: Shape, regression: bool) -> tuple[Tensor, Tensor] | None:
    """A draw from one pool table in the wanted shape, or None where it is too narrow or lacks classes."""
    rows = torch.randperm(table.features.shape[0])[: shape.rows]
    x, y, numeric = table.features[rows], table.target[rows], table.numeric
    if random.random() < 0.35 and x.shape[1] > 3:
        promoted = random.randrange(x.shape[1])
        others = [column for column in range(x.shape[1]) if column != promoted]
        rest = [x[:, others]] + ([y[:, None]] if random.random() < 0.3 else [])
        x, y, numeric = torch.cat(rest, 1), x[:, promoted], True
    if x.shape[1] < shape.columns:
        return None
    x = x[:, torch.randperm(x.shape[1])[: shape.columns]]
    if regression:
        return x, y
    ids = cut_into_classes(y, draw_class_count()) if numeric else y.long()
    finished = finish_classes(ids, shape.context_rows)
    return None if finished is None else (x, finished)


def pool_tables(pool: list[Table], shape: Shape, regression: bool) -> list[tuple[Tensor, Tensor]]:
    """Draws from random pool tables until the batch is full, in at most 20 tries a table."""
    tables: list[tuple[Tensor, Tensor]] = []
    for _ in range(20 * shape.tables):
        drawn = vary(random.choice(pool), shape, regression)
        if drawn is not None:
            tables.append(drawn)
        if len(tables) == shape.tables:
            break
    return tables


def scale(values: Tensor, context_rows: int, least: float) -> Tensor:
    context = values[:, :context_rows]
    return (values - context.mean(1, keepdim=True)) / context.std(1, keepdim=True).clamp_min(least)


def prepare(features: Tensor, target: Tensor, context_rows: int, regression: bool) -> Batch:
    """Scales as inference does, after a random monotone warp; at times holes are filled with the mean."""
    if random.random() < 0.3:
        features = features.sign() * features.abs() ** random.uniform(0.5, 1.6)
    features = scale(features, context_rows, 1e-6).clamp(-6, 6)
    if random.random() < 0.2:
        features = features.masked_fill(torch.rand_like(features) < random.uniform(0, 0.1), 0.0)
    if regression:
        target = scale(target, context_rows, 1e-4).clamp(-10, 10)
    return Batch(features, target, context_rows)


def draw_batch(pool: list[Table], regression: bool, cheap_share: float) -> Batch:
    """A batch of one shape, from the cheap prior with the probability `cheap_share`, else from the pool."""
    while True:
        shape = draw_shape()
        if random.random() < cheap_share:
            tables = cheap_tables(shape, regression)
        else:
            tables = pool_tables(pool, shape, regression)
        if len(tables) < 2:
            continue
        features, target = (torch.stack(part) for part in zip(*tables, strict=True))
        batch = prepare(features, target, shape.context_rows, regression)
        if bool(batch.features.isfinite().all()) and bool(batch.target.isfinite().all()):
            return batch
