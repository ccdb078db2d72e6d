"""A run that was trained, whose clients classify new images."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmark.contract import Stage
from benchmark.engine.client_state import PARTICIPATED
from benchmark.engine.roles import overrides
from benchmark.errors import ConfigurationError, listed
from benchmark.method import FederatedMethod
from benchmark.paths import user_path
from benchmark.predict.answers import Unread, answers, cells, heads
from benchmark.predict.client_model import ClientModel, Point, fits_a_copy
from benchmark.predict.files import decoded, decoding_of, list_files
from benchmark.predict.loaded import RunDirectory
from benchmark.predict.new_client import labelled_images
from benchmark.predict.site import SiteModel
from benchmark.records.record_file import is_finished
from benchmark.run.federation_file import FederationFacts
from benchmark.run.resume import config_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd

    from datamodules.federated import FederatedDataModule


class TrainedRun:
    """A finished run for use: its clients by name classify new images.

    The run's ``config.yaml`` says which classes are imported and called: open only directories you trust. The training
    data are read where an answer depends on them: where the method fits a copy of a client on its training images
    before it is asked, or looks at these while it answers.

    Args:
        run_dir: of a finished run, with its last checkpoint.
        data_dir: of the data sets, for a run that was made elsewhere; of weights beside them, too.
        device: ``"auto"``, a GPU where there is one; ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ConfigurationError: no checkpoint was kept, it is not one of this configuration, or the frozen weights are
            others.

    Attributes:
        method: as it was after the last round.
        facts: names of classes and clients, and what else is known of the federation.
    """

    def __init__(self, run_dir: str | Path, data_dir: str | Path | None = None, device: str = "auto") -> None:
        self.directory: RunDirectory | None = RunDirectory(user_path(run_dir), data_dir, device_of(device))
        config_of(self.directory.folder)  # before anything in it is opened
        facts = self.directory.facts
        self.has_data = facts is None
        if facts is None:
            why = f"{run_dir} is of an older version, which left no federation.json, so the run's data are needed"
            self.method, self.facts = self._with_data(self.directory, why)
        else:
            self.method, self.facts = self.directory.without_data(facts), facts

    @classmethod
    def of(cls, method: FederatedMethod, data: "FederatedDataModule") -> Self:
        """Return a run of this process, which has ended."""
        made = cls.__new__(cls)
        made.directory, made.has_data = None, True
        made.method, made.facts = method, FederationFacts.of(data)
        return made

    @property
    def name(self) -> str:
        """Return the method's name."""
        return type(self.method).__name__

    @property
    def rounds(self) -> int:
        """Return how many rounds were trained."""
        return self.method.server.finished_rounds

    @property
    def client_names(self) -> tuple[str, ...]:
        """Return the clients' names, by number."""
        return self.facts.client_names

    def described(self) -> dict[str, Any]:
        """Return what names the run, for ``model.json``."""
        return {} if self.directory is None else {"run": self.directory.described()}

    @property
    def fits_new_clients(self) -> bool:
        """Return whether the method fits anything to a client that never trains."""
        return bool(self.method.simulation.phases[Stage.ADAPT])

    def remarks(self, model: ClientModel) -> list[str]:
        """Return what a reader of a client's answers must know of them."""
        found = []
        if self.directory is not None and self.site is None and not is_finished(self.directory.folder):
            found.append("the run is not finished: this is its last round so far")
        if self.facts.decoding is None:
            found.append(
                "the data set does not say how a file becomes an image: each is read as a viewer shows it, and resized "
                f"to {self.facts.image_size[0]} pixels a side"
            )
        if model.draws:
            found.append(
                f"{self.name} draws for each image: here what the run's evaluation drew for the test image of the same "
                "place, so that an image in another place has other draws"
            )
            recorded = self.directory.recorded_device if self.directory is not None else None
            if recorded is not None and (recorded == "cpu") != (self.method.device.type == "cpu"):
                found.append(f"the run was made on {recorded}, whose draws another kind of device does not repeat")
        return found

    # ------------------------------------------------------------------ clients

    def client(self, client: str | int | None = None, point: Point | None = None) -> ClientModel:
        """Return a client's model.

        Args:
            client: its name, or its number; None where all clients have one model.
            point: where in a round: ``"server"``, after the aggregation, or ``"local"``, as its last local training
                left it; None is where the method's paper reads it, if the client is known there.

        Raises:
            ConfigurationError: no such client, none where each has its own model, nothing kept of it at this point, or
                training data are needed and not there.
        """
        number = self._number(client) if client is not None else self._one_for_all(point)
        chosen = self._point(number, point)
        self._take_data(number, chosen)
        fitted = None if self.site is None else self.site.fitted
        return ClientModel(self.method, self.facts, number, chosen, fitted)

    def new_client(self, folder: str | Path, name: str | None = None) -> ClientModel:
        """Return the model of a client that was no part of the run, fitted first as the method says.

        Args:
            folder: of its labelled images, a folder for each class, named as the run's classes are.
            name: of the client; the folder's by default.

        Raises:
            ConfigurationError: a folder of no class of the run, an image that cannot be read, the run is one of this
                process, or its clients tell different classes apart.
        """
        if self.directory is None:
            raise ConfigurationError("a new client needs a run with a directory: fit with run_dir, then TrainedRun")
        if self.site is not None:
            raise ConfigurationError("a site of a deployment knows its own model alone: ask for no new client")
        if self.facts.terms.own_spaces:
            raise ConfigurationError(
                "clients of this run tell different classes apart, and which a new one would is not known: take a "
                "client of the run"
            )
        number = len(self.facts.client_names)
        made = labelled_images(user_path(folder), self.facts, number, name)
        counts = torch.bincount(made.labels, minlength=len(self.facts.class_names))
        facts = self.facts.with_new_client(made.name, counts)
        return ClientModel(self.directory.without_data(facts, made), facts, number, "server")

    def _number(self, client: str | int) -> int:
        names = self.client_names
        try:
            number = names.index(client) if isinstance(client, str) and client in names else int(client)
        except ValueError:
            number = -1
        if number not in range(len(names)):
            raise ConfigurationError(
                f"there is no client {client!r}; there are {listed(names)}, or by number 0 to {len(names) - 1}"
            )
        if self.site is not None and number != self.site.client:
            raise ConfigurationError(f"this folder holds the model of {names[self.site.client]} alone, not of {client}")
        return number

    @property
    def site(self) -> SiteModel | None:
        """Return the only model that is here, where the folder is that of a site of a deployment."""
        return None if self.directory is None else self.directory.site

    def _one_for_all(self, point: Point | None) -> int:
        """Return any client, where all have one model of the same classes; in a site's folder the site.

        Raises:
            ConfigurationError: each has its own.
        """
        if self.site is not None:
            return self.site.client
        method, simulation = self.method, self.method.simulation
        own_classes = bool(simulation.terms.own_spaces) or self.facts.label_orders > 1
        one = len(self.client_names) == 1 or not (
            own_classes
            or (point or (method.evaluate_local and method.paper_point)) == "local"
            or method.roles.personal
            or method.roles.remembered
            or simulation.phases[Stage.FINETUNE]
            or "own_images" in method.inputs
            or overrides(method, "client_constants")
            or method.draw_noise(torch.Generator(), 1, Stage.EVALUATE)
            or simulation.received(method.server.rule, method.server.evaluated, (0,)).own
        )
        if not one:
            has = f"{self.name} has a model for each client"
            if own_classes:
                has = "clients of this run tell different classes apart, or count them in different orders"
            raise ConfigurationError(f"{has}; say which one: {listed(self.client_names)}")
        return simulation.terms.training_clients[0]

    def _point(self, client: int, asked: Point | None) -> Point:
        method = self.method
        if client not in method.store.held:
            raise ConfigurationError(f"client {client} lies with another rank of the run; open its directory to ask")
        known = method.evaluate_local and (
            PARTICIPATED not in method.store.names
            or bool(method.store.rows(PARTICIPATED, (client,), torch.device("cpu")).item())
        )
        if asked == "local" and not known:
            why = (
                f"{self.client_names[client]} has never trained"
                if method.evaluate_local
                else f"the run stored no client of {self.name} as local training left it (data.evaluate_local)"
            )
            raise ConfigurationError(f"{why}; ask for the point server, after aggregation")
        if asked not in (None, "server", "local"):
            raise ConfigurationError(f"the point must be server or local, got {asked!r}")
        return asked or ("local" if known and method.paper_point == "local" else "server")

    def _take_data(self, client: int, point: Point) -> None:
        """Read the run's data, where a client cannot answer without them."""
        method = self.method
        fitted = fits_a_copy(method, client, point) and not (self.site is not None and self.site.fitted)
        if self.has_data or not (fitted or "own_images" in method.inputs):
            return
        assert self.directory is not None
        does = "fits a copy of a client on its training images" if fitted else "looks at a client's training images"
        self.method, self.facts = self._with_data(
            self.directory, f"{self.name} {does} before it predicts, so the run's data are needed"
        )
        self.has_data = True

    @staticmethod
    def _with_data(directory: RunDirectory, why: str) -> tuple[FederatedMethod, FederationFacts]:
        try:
            return directory.with_data()
        except ConfigurationError as error:
            raise ConfigurationError(f"{why} (elsewhere: --data_dir): {error}") from error

    # ------------------------------------------------------------------ predictions

    def predict(
        self,
        images: str | Path | Sequence[str | Path] | Tensor,
        client: str | int | None = None,
        point: Point | None = None,
        top: int = 1,
    ) -> "pd.DataFrame":
        """Classify images as a client does.

        Args:
            images: an image, a folder of images, a list of images (CSV with a column ``path``), several of these; or
                uint8 [n, 3, H, W], as the run stores its own.
            client: see :meth:`client`.
            point: see :meth:`client`.
            top: classes for each image, the most probable first.

        Returns:
            A row for each image: ``path`` (or ``image``, its number), ``class``, ``probability``, and further classes.
            An image that cannot be read is left out with a warning.

        Raises:
            ConfigurationError: see :meth:`client`, there is no image, or ``top`` is no number from 1 on.
        """
        return predictions(self.client(client, point), images, top)

    def export(
        self,
        folder: str | Path,
        client: str | int | None = None,
        point: Point | None = None,
        onnx: bool = False,
        overwrite: bool = False,
    ) -> list[Path]:
        """Write a client's model as files that need none of this code, nor a GPU; returns them.

        Args:
            folder: to write into; made where it is missing.
            client: see :meth:`client`.
            point: see :meth:`client`.
            onnx: also as ONNX.
            overwrite: write over what is in the folder.

        Raises:
            ConfigurationError: see :meth:`client`, the folder holds something, or the method cannot be exported.
        """
        from benchmark.predict.export import check_folder, check_onnx, export

        at = user_path(folder)
        check_folder(at, overwrite)
        if onnx:
            check_onnx()
        return export(self._on_cpu().client(client, point), at, self.described(), onnx)

    def _on_cpu(self) -> "TrainedRun":
        """Return the run where its graph needs no GPU; what a Trainer has fitted lies there already."""
        if self.directory is None or self.directory.device.type == "cpu":
            return self
        return TrainedRun(self.directory.folder, self.directory.data_dir, "cpu")


def predictions(model: ClientModel, images: str | Path | Sequence[str | Path] | Tensor, top: int = 1) -> "pd.DataFrame":
    """Return the table of :meth:`TrainedRun.predict` of a client's model."""
    import pandas as pd

    if type(top) is not int or top < 1:
        raise ConfigurationError(f"top says how many classes of each image there are, from 1 on; got {top!r:.40}")
    items: Iterable[tuple[str, NDArray[np.uint8] | str]]
    if isinstance(images, Tensor):
        items = ((str(number), image.numpy()) for number, image in enumerate(images.cpu()))
    else:
        given = [images] if isinstance(images, str | Path) else images
        files, remarks = list_files(map(user_path, given))
        for remark in remarks:
            warnings.warn(remark, stacklevel=3)
        items = ((str(path), pixels) for path, pixels in decoded(files, decoding_of(model.facts)))
    rows = []
    for answer in answers(model, items):
        if isinstance(answer, Unread):
            warnings.warn(answer.why, stacklevel=3)
        else:
            rows.append([answer.name, *cells(answer, model.class_names, top)])
    first = "image" if isinstance(images, Tensor) else "path"
    made = pd.DataFrame(rows, columns=[first, *heads(model.class_names, top)])
    return made.astype({"image": int}) if first == "image" else made


def device_of(given: str) -> torch.device:
    """Return the device that a name stands for.

    Raises:
        ConfigurationError: there is none of this name.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if given == "auto" else given
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and (device.index or 0) not in range(torch.cuda.device_count())
    ):
        raise ConfigurationError(
            f"there is no device {given!r} here; give auto, cpu" + ", or cuda" * torch.cuda.is_available()
        )
    return device
