"""Trains a small convolutional net on handwritten digits, in any number of processes.

    shoal run -N2 train.py                          one process per GPU, on two nodes
    shoal run -N2 train.py --parallel fsdp          the same, with a sharded model
    torchrun --nproc-per-node 2 train.py            without a cluster
    python train.py

Lines that end in a number use Shoal; the rest is plain PyTorch.

    (1) connects the ranks, under any launcher          (5) saves, stops when Slurm signals, resumes
    (2) the model, replicated or sharded                (6) one run in MLflow, or in files without a server
    (3) each rank's part of every batch                 (7) progress, here and in `shoal jobs`
    (4) what a checkpoint holds
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from pathlib import Path

import curve
import numpy
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from shoal.train import Loader, Progress, Run, TrainState, init, parallelize, shutdown, tracker


class Net(nn.Module):
    """Two blocks of convolutions and a linear layer. FSDP cuts it at the members of the ModuleList."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.head = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def block(channels: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's 1,797 images of 8 × 8 pixels and the digit that each shows; every fifth is held out."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the digits come with scikit-learn, which is not installed: pip install scikit-learn")
    # From its file: importing scikit-learn takes two seconds in every rank.
    file = Path(package.submodule_search_locations[0], "datasets/data/digits.csv.gz")
    table = torch.from_numpy(numpy.loadtxt(file, delimiter=","))
    images = (table[:, :64] / 16).reshape(-1, 1, 8, 8).to(torch.get_default_dtype())
    labels = table[:, 64].long()
    held_out = torch.arange(len(table)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def main() -> None:
    options = arguments()
    device = init().device  # (1)
    torch.manual_seed(options.seed)
    train_set, test_set = digits()

    model = parallelize(Net(), options.parallel)  # (2)
    # With the usual eps of 1e-8, Adam takes a whole step where a gradient is nothing but float32's rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=1e-3)
    loader = Loader(train_set, global_batch=options.batch, seed=options.seed)  # (3)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    total = options.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total)

    state = TrainState(model, optimizer, scheduler, loader)  # (4)
    run = Run(state, options.checkpoints, save_every=5 * len(loader))  # (5)
    with tracker(vars(options)) as track, Progress(total, samples_per_step=options.batch) as progress:  # (6) (7)
        for step in run.steps(total):  # (5)
            images, labels = next(batches)
            losses = cross_entropy(model(images.to(device)), labels.to(device), reduction="none")
            loss = (losses * loader.weights.to(device)).sum()  # (3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss = sum_over_ranks(loss) / torch.distributed.get_world_size()
            track.log({"loss": loss}, step + 1)  # (6)
            progress.step(step + 1, loss)  # (7)
        accuracy = evaluate(model, test_set, device)
        track.log({"accuracy": accuracy}, total)  # (6)
        if torch.distributed.get_rank() == 0:
            print(f"accuracy on {len(test_set)} held-out images: {accuracy:.2%}")
            track.flush()
            track.data("loss.svg", curve.svg(curve.read(track.directory / "metrics.jsonl", "loss"), "loss").encode())
    shutdown()


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The accuracy. Each rank evaluates some of the images."""
    mine = slice(torch.distributed.get_rank(), None, torch.distributed.get_world_size())
    images, labels = data[mine]
    right = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    return sum_over_ranks(right).item() / len(data)


def sum_over_ranks(value: Tensor) -> Tensor:
    total = value.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small net on handwritten digits.")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="replicated or sharded")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128, help="images in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.1, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", help="where to save; by default in the job's directory, or here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
