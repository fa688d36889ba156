"""Train a network on images with a recipe, from the first batch to the folded network."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta

import torch
from torch import Tensor, nn

from ..collectives import gather_objects
from ..data import Augment, ImageBatches, Normalize, open_images, seed_at
from ..data.image_sources import describe_data, training_splits
from ..evaluate import Accuracy, count_correct
from ..evaluate.accuracy import TOP5_CLASSES
from ..jobs import Stopped, StopSignal, stop_signal
from ..monitor import Monitor, Record
from ..monitor.percentiles import NothingToRecordError
from ..network_copy import outputs
from . import checkpoint
from .distributed import Ranks, ranks
from .final_network import example_images, folded_network, population_network, scores_of, statistics_of
from .lock import locked
from .metrics import Logger, Result, hardware, write_run_result
from .options import Options
from .recipe import Recipe
from .resume import RunState, claim_folder, has_checkpoints, resume_, save_state
from .state_dicts import start_from_
from .step import TrainStep, make_optimizer

# With several ranks, the number of steps between checks for a stop signal on any rank. Each check is an all-reduce.
AGREE_EVERY = 10
# The time left is estimated from how long this process takes from its 10th to its 100th step.
TIMED = (10, 100)


def train(recipe: Recipe, options: Options) -> Result:
    """Train a network with a recipe, resuming an interrupted run from its last checkpoint.

    On the CPU, with the same number of threads and ranks, a resumed run ends with bit-for-bit the same weights as an
    uninterrupted run. Under ``torchrun``, each batch is divided among the ranks.

        recipe = dataclasses.replace(RECIPES["bn-x30"], size=64)
        result = train(recipe, Options(Path("images"), Path("runs/mine"), device="cuda"))
        print(result.top1)

    Args:
        recipe: what to train and how.
        options: data, folder, device and how often to report.

    Returns:
        A summary, which is also in ``result.json``. The metrics are in ``metrics.jsonl``. Unless training diverged, the
        network is in ``final/``.

    Raises:
        FileNotFoundError: if the data, or the run or file to start from, is not found.
        Stopped: after SIGTERM or Ctrl-C; raised once a checkpoint is written.
        ValueError: if the device is not available, if the network cannot be built, if the data, the folder or its
            checkpoints do not fit the recipe, or if another process trains in the same folder.

    Paper: Sec. 4.2.2; Alg. 2, l. 7-11 (after the last step)
    """
    # With benchmark_limit=0, cuDNN tries all convolution algorithms once for each shape.
    tuned = torch.backends.cudnn.flags(enabled=True, benchmark=True, benchmark_limit=0)
    with (
        ranks(options.device) as here,
        locked(options.folder(recipe)) if here.main else nullcontext(),
        stop_signal() as stop,
        tuned,
    ):
        return _Training(recipe, options, here, stop).finish()


class _Training:
    def __init__(self, recipe: Recipe, options: Options, here: Ranks, stop: StopSignal) -> None:
        self.recipe, self.options, self.ranks, self.stop = recipe, options, here, stop
        self.folder = options.folder(recipe)
        splits = training_splits(options.data, recipe.validate)
        self.batches = self._open(splits[0], recipe.batch_size, train=True)
        self.validation = self._open(splits[1], options.evaluate_batch, train=False)
        if self.validation.classes != self.batches.classes:
            raise ValueError(f"{options.data}: {_class_mismatch(self.batches.classes, self.validation.classes)}")
        if len(self.batches.classes) < 2:
            raise ValueError(
                f"{options.data} has a single class, {self.batches.classes[0]}, so there is nothing to learn: give a"
                " folder whose train folder has a folder for each class"
            )
        cuda = here.device.type == "cuda"
        self.bf16 = cuda if options.precision == "auto" else options.precision == "bf16"
        self.net = recipe.network(len(self.batches.classes))
        begins = recipe.start and not has_checkpoints(self.folder)
        started = start_from_(self.net, recipe.start, len(self.batches.classes)) if begins else ""
        if recipe.factory:  # raise an error now, not after days of training, if the network cannot be folded
            folded_network(self.net.eval(), recipe.size)
        self.net.train().to(here.device)
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.augment = Augment(recipe.photometric, dtype=dtype).to(here.device)
        self.normalize = Normalize(dtype=dtype).to(here.device)
        self.monitor = self._make_monitor() if options.monitor_every else None
        # Claim the folder only after checking the data and the network: a mistyped --data or --size must not leave a
        # folder that looks like a run and rejects the corrected command.
        if here.main:
            data = describe_data(options.data, splits)
            claim_folder(self.folder, recipe, data, planned_steps=self.planned_steps)
            print(self._plan(), *filter(None, [started]), sep="\n", flush=True)
        here.wait()
        if cuda:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(self.net, recipe, here.device)
        state = resume_(self.folder, self.net, self.optimizer, here, self.total_steps, recipe)
        self.step, self.evaluated = state.step, state.evaluated
        self.first, self.began = state.step, 0.0
        # By default, only the paper's network uses compilation, CUDA graphs and cast_once, because they are tested only
        # with this network. A user's network may run code on the host, which a CUDA graph does not replay.
        fast = cuda and not recipe.factory
        self.train_step = TrainStep(
            self.net,
            self.optimizer,
            self.augment,
            here,
            bf16=self.bf16,
            compile=options.compile or ("network" if fast and here.world_size > 1 else "nothing"),
            cast_once=fast,
            graph=fast and here.world_size == 1 if options.graph is None else options.graph,
            batch=len(range(recipe.batch_size)[self.batches.order.rows(0)]),
        )
        if state.sums is not None:
            self.train_step.sums.copy_(state.sums)
        self.logger: Logger | None = None
        if here.main:
            self.logger = Logger(self.folder, state.positions, self.total_steps, tensorboard=options.tensorboard)

    @property
    def total_steps(self) -> int:
        planned = self.planned_steps
        return planned if self.options.max_steps is None else min(planned, self.options.max_steps)

    @property
    def planned_steps(self) -> int:
        return self.recipe.steps(len(self.batches))

    def _plan(self) -> str:
        recipe, ranks = self.recipe, self.ranks
        network = recipe.factory or "the paper's network"
        if recipe.normalize != "as-is":
            network += f" ({recipe.normalize})"
        device = ranks.device.type if ranks.world_size == 1 else f"{ranks.world_size} x {ranks.device.type}"
        images, classes, held = self.batches.num_examples, len(self.batches.classes), self.validation.num_examples
        steps, size = self.total_steps, self.batches.order.step_size(0)  # no step has more images than the first
        few = f", too few images for --batch-size {recipe.batch_size:,}" if images < recipe.batch_size else ""
        return (
            f"{recipe.name}: {network} on {images:,} images of {classes:,} classes, validated on {held:,};"
            f" {steps:,} step{'s' * (steps != 1)} of {size:,} images on {device}{few}, in {self.folder}"
        )

    def finish(self) -> Result:
        try:
            diverged = self._train()
            return self._conclude(diverged)
        finally:
            if self.logger is not None:
                self.logger.close()

    def _train(self) -> bool:
        """Run the training loop; return whether it ended early because the loss became NaN or infinite."""
        self._evaluate_if_due()
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, len(self.batches))
            for k, batch in enumerate(self.batches.numbered_epoch(epoch, start), start):
                self._train_on(*batch, k)
                if (self.step % self.options.log_every == 0 or self._evaluation_due()) and not self._log():
                    return True
                self._monitor_if_due()
                if self._stop_requested():
                    self._save()
                    raise Stopped(f"stopped at step {self.step:,}; run the same command again to resume")
                self._evaluate_if_due()
                ended = self.step == self.total_steps
                if ended or self.step % self.options.checkpoint_every == 0:
                    self._save()
                if ended:
                    break
        return False

    def _train_on(self, images: Tensor, labels: Tensor, positions: Tensor, k: int) -> None:
        """Take one step.

        The random numbers of a step depend only on the seed, the step and the rank, so checkpoints need not store the
        state of random number generators.
        """
        rate = self.recipe.rate_at(self.step, len(self.batches))
        self._seed(seed_at(self.recipe.seed, 1, self.step, self.ranks.rank))  # dropout uses this seed
        generator = torch.Generator().manual_seed(seed_at(self.recipe.seed, 2, self.step))
        draws = self.augment.draw(self.batches.order.step_size(k), generator)[positions]
        self.train_step(images, labels, draws, rate)
        self.step += 1
        if self.logger is not None:
            self.logger.advance(self.step)
            self._tell_time_left(self.logger)

    def _seed(self, seed: int) -> None:
        # torch.manual_seed() is slower: it also formats a stack trace for each type of device that is not in use.
        torch.default_generator.manual_seed(seed)
        if self.ranks.device.type == "cuda":
            torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)

    def _tell_time_left(self, logger: Logger) -> None:
        """Print an estimate of the time left, once, after the slow first steps."""
        taken, left = self.step - self.first, self.total_steps - self.step
        if taken not in TIMED or not left:
            return
        self.train_step.sums.tolist()  # waits until the device has finished all steps
        now = time.perf_counter()
        if taken == TIMED[1]:
            seconds = (now - self.began) / (TIMED[1] - TIMED[0]) * left
            logger.display.say(f"about {timedelta(seconds=round(seconds))} left for {left:,} steps")
        self.began = now

    def _log(self) -> bool:
        """Log the mean loss and accuracy over the steps since the last call; return whether the loss is finite."""
        sums = self.ranks.sum_(self.train_step.sums.clone())
        self.train_step.sums.zero_()
        loss, right, count = sums.tolist()
        if self.logger is not None:
            self.logger.log({"step": self.step, "loss": loss / count, "train_top1": right / count})
        return math.isfinite(loss)

    def _make_monitor(self) -> Monitor:
        """Return a monitor with a validation batch as its probe; raise ValueError if there is nothing to record."""
        images, _ = next(iter(self.validation.epoch(0)))
        try:
            monitor = Monitor(self.net, probe=self.normalize(images))
            self._record(monitor, 0)
        except NothingToRecordError as error:
            raise ValueError(
                "--monitor-every found nothing to record: it watches modules such as nn.ReLU or, if the network has no"
                " such modules, normalization layers. This network calls neither, perhaps because it uses functions"
                " such as F.relu. Remove this option"
            ) from error
        return monitor

    def _record(self, monitor: Monitor, step: int) -> Record:
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16):
            return monitor.record(step)

    def _monitor_if_due(self) -> None:
        """If due, record percentiles of the nonlinearities' inputs on a validation batch; training is not affected."""
        if self.monitor is None or self.step % self.options.monitor_every:
            return
        record = self._record(self.monitor, self.step)
        if self.logger is not None:
            self.logger.log_monitor(record)

    def _evaluation_due(self) -> bool:
        every = self.options.evaluate_every or len(self.batches)
        at = self.step > 0 and (self.step % every == 0 or self.step == self.total_steps)
        return at and self.evaluated != self.step

    def _evaluate_if_due(self) -> None:
        if not self._evaluation_due():
            return
        loss = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
        accuracy = self._accuracy(self.net, self.validation, loss)
        mean = self.ranks.sum_(loss).item() / accuracy.examples
        self.evaluated = self.step
        if self.logger is not None:
            self.logger.log({"step": self.step, **self._shown(accuracy), "val_loss": mean})

    def _shown(self, accuracy: Accuracy) -> dict[str, float]:
        found = {"val_top1": accuracy.top1}
        return {**found, "val_top5": accuracy.top5} if len(self.batches.classes) >= TOP5_CLASSES else found

    def _accuracy(self, net: nn.Module, batches: ImageBatches, loss: Tensor | None = None) -> Accuracy:
        net.eval()
        counts = count_correct(
            net, self._interruptible(batches), self.normalize, self.ranks.device, bf16=self.bf16, loss=loss
        )
        net.train()
        accuracy = Accuracy.of(self.ranks.sum_(counts))
        if not accuracy.examples:
            raise ValueError(
                f"{self.options.data}: none of the {batches.num_examples} images to score can be read: replace them"
            )
        return accuracy

    def _interruptible(self, batches: ImageBatches) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches.epoch(0):
            # With several ranks, a rank that stopped here would leave the others waiting, so all ranks finish the
            # validation.
            if self.stop.requested and self.ranks.world_size == 1 and self.step > self.evaluated:
                self._save()
                raise Stopped(f"stopped at step {self.step:,}, during validation; run the same command again to resume")
            yield batch

    def _stop_requested(self) -> bool:
        if self.ranks.world_size == 1:
            return self.stop.requested
        return self.step % AGREE_EVERY == 0 and self.ranks.any(self.stop.requested)

    def _save(self) -> None:
        positions = (0, 0) if self.logger is None else self.logger.positions()
        state = RunState(self.step, self.evaluated, positions, self.train_step.sums)
        save_state(self.folder, state, self.net, self.optimizer, self.ranks, self._scores(self.net))

    def _scores(self, net: nn.Module) -> Tensor | None:
        """Return scores that later show whether the code of the user's network has changed; see check_scores."""
        return scores_of(net, self.recipe.size) if self.recipe.factory and self.ranks.main else None

    def _conclude(self, diverged: bool) -> Result:
        """Unless training diverged, finish Algorithm 2 and save the final network; then write the result file."""
        accuracy = on_training = None
        net = None if diverged else self._inference_network()
        if net is not None:
            accuracy = self._accuracy(net, self.validation)
            if self.options.score_training:
                on_training = self._accuracy(net, self.batches.centered(self.options.evaluate_batch))
        corrupt = [
            file
            for images in (self.batches, self.validation)
            for file in sorted(set().union(*gather_objects(images.corrupt)))
        ]
        result = Result(
            self.recipe.name,
            self.step,
            self.batches.num_examples,
            len(self.batches.classes),
            net is None,
            top1=None if accuracy is None else accuracy.top1,
            top5=None if accuracy is None else accuracy.top5,
            train_top1=None if on_training is None else on_training.top1,
            statistics=statistics_of(self.net),
            corrupt=len(corrupt),
            corrupt_files=tuple(f"{file.name} ({file.reason})" for file in corrupt[:20]),
            hardware=hardware(self.ranks),
        )
        if self.logger is not None:
            if accuracy is not None:
                self.logger.log({"step": self.step, "final": True, **self._shown(accuracy)})
            write_run_result(self.folder, result, self.options.targets)
        self.ranks.wait()
        return result

    def _inference_network(self) -> nn.Module | None:
        """Save the final network and return it folded, or return None if its outputs include NaN or infinity."""
        epoch = -(-self.step // len(self.batches))
        count, seed = self.options.estimate_batches, self.recipe.seed
        final = population_network(
            self.net, self.batches, self.augment, epoch=epoch, seed=seed, count=count, bf16=self.bf16
        )
        if not outputs(final, example_images(self.recipe.size)).isfinite().all():
            return None
        if self.ranks.main:
            state = {
                "classes": list(self.batches.classes),
                "network": self.recipe.network_fields,
                "scores": self._scores(final),
            }
            checkpoint.save(self.folder / "final", self.step, final.state_dict(), state)
        return folded_network(final, self.recipe.size)

    def _open(self, split: str, batch_size: int, *, train: bool) -> ImageBatches:
        options = self.options
        return open_images(
            options.data,
            split,
            size=self.recipe.size,
            batch_size=batch_size,
            train=train,
            shuffle=self.recipe.shuffle,
            seed=self.recipe.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            workers=options.workers,
            cache=options.cache,
            decoded=options.decoded,
            device=self.ranks.device,
        )


def _class_mismatch(train: tuple[str, ...], val: tuple[str, ...]) -> str:
    """Describe how the classes of the training and validation data differ.

    >>> _class_mismatch(("cat", "dog"), ("cat", "fish"))
    "train and val must have the same classes, but only train has 'dog'"
    """
    single = sorted({*train} ^ {*val})
    split = "train" if single and single[0] in train else "val"
    how = f"only {split} has {single[0]!r}" if single else "their order differs"
    return f"train and val must have the same classes, but {how}"
