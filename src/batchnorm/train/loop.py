"""Train a recipe on image data: one loop, from the first batch to the folded network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..data import Augment, ImageBatches, Normalize, open_images, seed_at
from ..data.fingerprint import describe_data
from ..evaluate import Accuracy, count_correct
from ..jobs import Stopped, StopSignal, stop_signal
from ..monitor import Monitor
from . import checkpoint
from .distributed import Ranks, ranks
from .finish import folded_network, population_network
from .lock import locked
from .recipe import Recipe
from .report import Reporter
from .run import Options, Result, claim_folder, compare, hardware, write_result
from .schedule import exponential_rate
from .step import TrainStep, make_optimizer

# Ranks agree on a stop every so many steps: often enough for a scheduler's grace period, rarely enough to cost nothing.
AGREE_EVERY = 10


def train(recipe: Recipe, options: Options) -> Result:
    """Train a network by a recipe, going on from the last checkpoint where the run was interrupted.

    On the CPU, at the same number of threads and ranks, an interrupted run ends with the same bits as one that was
    not. Under ``torchrun`` the batch is spread over the ranks.

    Args:
        recipe: what to train and how.
        options: on what data, on which device, and how often to report.

    Returns:
        The result that is also in ``result.json``; ``metrics.jsonl`` has the course of the run, ``final/`` the network.

    Raises:
        Stopped: if SIGTERM or Ctrl-C came; the state is saved.
        ValueError: if the data, the folder or its checkpoints do not fit the recipe, or another process trains there.

    Paper: Sec. 4.2.2; Alg. 2 at the end
    """
    tuned = torch.backends.cudnn.flags(enabled=True, benchmark=True)
    with (
        ranks(options.device) as here,
        locked(options.folder(recipe)) if here.main else nullcontext(),
        stop_signal() as stop,
        tuned,
    ):
        return _Run(recipe, options, here, stop).finish()


class _Run:
    def __init__(self, recipe: Recipe, options: Options, here: Ranks, stop: StopSignal) -> None:
        self.recipe, self.options, self.ranks, self.stop = recipe, options, here, stop
        self.folder = options.folder(recipe)
        self.batches = self._open("train", recipe.batch_size)
        self.validation = self._open("val", options.evaluate_batch)
        if self.validation.classes != self.batches.classes:
            raise ValueError(f"{options.data}: train and val do not have the same classes")
        cuda = here.device.type == "cuda"
        self.bf16 = cuda if options.precision == "auto" else options.precision == "bf16"
        self.net = recipe.network(len(self.batches.classes)).to(here.device)
        # Only now that there is a network and something to train it on: a mistyped --data or --size must not leave a
        # folder that looks like a run, and refuses the right one.
        if here.main:
            claim_folder(self.folder, recipe, describe_data(options.data))
        here.wait()
        if cuda:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(self.net, recipe, here.device)
        # What autocast would make of the images anyway.
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.augment = Augment(recipe.photometric, dtype=dtype).to(here.device)
        self.normalize = Normalize(dtype=dtype).to(here.device)
        self.step, self.evaluated = 0, 0
        self.monitor: Monitor | None = None
        positions, sums = self._resume()
        self.train_step = TrainStep(
            self.net,
            self.optimizer,
            self.augment,
            here,
            bf16=self.bf16,
            compile=options.compile or ("network" if cuda and here.world_size > 1 else "nothing"),
            cast_once=cuda,
            graph=cuda and here.world_size == 1 if options.graph is None else options.graph,
            batch=len(range(recipe.batch_size)[self.batches.order.rows(0)]),
        )
        if sums is not None:
            self.train_step.sums.copy_(sums)
        self.report = (
            Reporter(self.folder, positions, self.total_steps, tensorboard=options.tensorboard) if here.main else None
        )

    @property
    def total_steps(self) -> int:
        """The length of the run."""
        planned = round(self.recipe.epochs * len(self.batches))
        return planned if self.options.max_steps is None else min(planned, self.options.max_steps)

    def finish(self) -> Result:
        """Train to the end, then replace running averages by population statistics and fold."""
        try:
            diverged = self._train()
            return self._conclude(diverged)
        finally:
            if self.report is not None:
                self.report.close()

    def _train(self) -> bool:
        """Run the loop; return whether the loss stopped being a number, which ends it."""
        self._evaluate_if_due()
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, len(self.batches))
            for k, (images, labels) in enumerate(self.batches.epoch(epoch, start), start):
                self._train_on(images, labels, k)
                if self.step % self.options.log_every == 0 and not self._log():
                    return True
                self._monitor_if_due()
                if self._stop_requested():
                    self._save()
                    raise Stopped(f"stopped at step {self.step:,}; the same command goes on from there")
                self._evaluate_if_due()
                ended = self.step == self.total_steps
                if ended or self.step % self.options.checkpoint_every == 0:
                    self._save()
                if ended:
                    break
        return False

    def _train_on(self, images: Tensor, labels: Tensor, k: int) -> None:
        """Take one step. All randomness is a function of (seed, step), so there is no generator's state to save."""
        every = self.recipe.decay_epochs * len(self.batches)
        rate = exponential_rate(self.step, initial=self.recipe.rate, factor=self.recipe.decay, every=every)
        torch.manual_seed(seed_at(self.recipe.seed, 1, self.step, self.ranks.rank))  # dropout
        generator = torch.Generator().manual_seed(seed_at(self.recipe.seed, 2, self.step))
        draws = self.augment.draw(self.batches.order.step_size(k), generator)[self.batches.order.rows(k)]
        self.train_step(images, labels, draws[: len(labels)], rate)
        self.step += 1
        if self.report is not None:
            self.report.advance(self.step)

    def _log(self) -> bool:
        """Report the mean over the steps since the last line; return whether the loss is still a number."""
        sums = self.ranks.sum_(self.train_step.sums.clone())
        self.train_step.sums.zero_()
        loss, right, count = sums.tolist()
        if self.report is not None:
            self.report.line({"step": self.step, "loss": loss / count, "train_top1": right / count})
        return math.isfinite(loss)

    def _monitor_if_due(self) -> None:
        """Record percentiles on the first validation batch, always the same one, without a trace in the training."""
        if self.options.monitor_every == 0 or self.step % self.options.monitor_every:
            return
        if self.monitor is None:
            images, _ = next(iter(self.validation.epoch(0)))
            self.monitor = Monitor(self.net, probe=self.normalize(images))
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16):
            record = self.monitor.record(self.step)
        if self.report is not None:
            self.report.watched(record)

    def _evaluate_if_due(self) -> None:
        every = self.options.evaluate_every or len(self.batches)
        due = self.step > 0 and (self.step % every == 0 or self.step == self.total_steps)
        if not due or self.evaluated == self.step:
            return
        accuracy = self._accuracy(self.net, self.validation)
        self.evaluated = self.step
        if self.report is not None:
            self.report.line({"step": self.step, "val_top1": accuracy.top1, "val_top5": accuracy.top5})

    def _accuracy(self, net: nn.Module, batches: ImageBatches) -> Accuracy:
        net.eval()
        counts = count_correct(net, self._interruptible(batches), self.normalize, self.ranks.device, bf16=self.bf16)
        net.train()
        return Accuracy.of(self.ranks.sum_(counts))

    def _interruptible(self, batches: ImageBatches) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches.epoch(0):
            # With several ranks the others would wait for this one: the stop then comes after the validation.
            if self.stop.requested and self.ranks.world_size == 1 and self.step > self.evaluated:
                self._save()
                raise Stopped(f"stopped at step {self.step:,}, in validation; the same command goes on from there")
            yield batch

    def _stop_requested(self) -> bool:
        if self.ranks.world_size == 1:
            return self.stop.requested
        return self.step % AGREE_EVERY == 0 and self.ranks.any(self.stop.requested)

    def _save(self) -> None:
        # Sums differ between ranks, all else is the same on each: gathered on every rank, written by one.
        sums = self.train_step.sums.new_zeros(self.ranks.world_size, 3)
        sums[self.ranks.rank] = self.train_step.sums
        self.ranks.sum_(sums)
        if self.report is not None:
            state = {
                "optimizer": self.optimizer.state_dict(),
                "sums": sums.cpu(),
                "evaluated": self.evaluated,
                "positions": self.report.positions(),
                "threads": torch.get_num_threads(),
            }
            checkpoint.save(self.folder / "checkpoints", self.step, self.net.state_dict(), state)
        self.ranks.wait()

    def _resume(self) -> tuple[tuple[int, int], Tensor | None]:
        """Load the newest good checkpoint; return the lengths of the files and this rank's sums then."""
        found = checkpoint.load_latest(self.folder / "checkpoints")
        if found is None:
            return (0, 0), None
        for problem in found.passed_over if self.ranks.main else ():
            print(f"passed over a checkpoint: {problem}")
        state = found.state
        try:
            self.net.load_state_dict(found.model)
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(state["optimizer"])
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # on a GPU the tensor itself, on its device; its value is set before each step
            self.step, self.evaluated = found.step, int(state["evaluated"])
            metrics, monitor = map(int, state["positions"])
            sums, threads = state["sums"].view(-1, 3), int(state["threads"])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint in {self.folder} does not fit the network: {error!r}") from error
        same = len(sums) == self.ranks.world_size and threads == torch.get_num_threads()
        if self.ranks.main:
            note = "" if same else "; the number of ranks or threads differs, so the last bits will"
            print(f"going on from step {found.step:,}{note}", flush=True)
        return (metrics, monitor), sums[self.ranks.rank] if same else sums.sum(0) / self.ranks.world_size

    def _conclude(self, diverged: bool) -> Result:
        """Take Algorithm 2 to its end, keep the network and write down how the run went."""
        accuracy = on_training = None
        if not diverged:
            net = self._inference_network()
            accuracy = self._accuracy(net, self.validation)
            if self.options.score_training:
                on_training = self._accuracy(net, self.batches.centred(self.options.evaluate_batch))
        corrupt = [*self.batches.corrupt, *self.validation.corrupt]
        result = Result(
            self.recipe.name,
            self.step,
            self.batches.num_examples,
            len(self.batches.classes),
            diverged,
            top1=None if accuracy is None else accuracy.top1,
            top5=None if accuracy is None else accuracy.top5,
            train_top1=None if on_training is None else on_training.top1,
            corrupt=len(corrupt),
            corrupt_files=tuple(f"{file.name} ({file.reason})" for file in corrupt[:20]),
            hardware=hardware(self.ranks),
        )
        if self.report is not None:
            if accuracy is not None:
                record = {"step": self.step, "final": True, "val_top1": accuracy.top1, "val_top5": accuracy.top5}
                self.report.line(record)
            write_result(self.folder, compare(result, self.folder, self.options.targets))
        self.ranks.wait()
        return result

    def _inference_network(self) -> nn.Module:
        epoch = -(-self.step // len(self.batches))
        count, seed = self.options.estimate_batches, self.recipe.seed
        final = population_network(
            self.net, self.batches, self.augment, epoch=epoch, seed=seed, count=count, bf16=self.bf16
        )
        if self.ranks.main:
            state = {"classes": list(self.batches.classes), "network": self.recipe.network_fields}
            checkpoint.save(self.folder / "final", self.step, final.state_dict(), state)
        return folded_network(final, self.recipe.size)

    def _open(self, split: str, batch_size: int) -> ImageBatches:
        training, options = split == "train", self.options
        return open_images(
            options.data,
            split,
            size=self.recipe.size,
            batch_size=batch_size,
            train=training,
            shuffle=self.recipe.shuffle,
            seed=self.recipe.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            workers=options.workers,
            cache=options.cache,
            decoded=options.decoded,
            device=self.ranks.device,
        )
