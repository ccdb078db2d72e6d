"""Hashes of configurations and partitions."""

import hashlib
import json
from typing import Any

#: Names in a section of the configuration ("" is its top) whose values cannot change a result.
RESULT_FREE = {
    "": frozenset({"run_dir", "config", "ckpt_path"}),
    "trainer": frozenset(
        {"logger", "default_root_dir", "enable_progress_bar", "enable_model_summary", "log_every_n_steps"}
    ),
    "data": frozenset(
        {
            "num_workers",
            "clients_at_once",
            "cohort_width",  # its older name
            "one_by_one",
            "val_only",  # which scores a run has, none of their values
            "keep_predictions",  # which scored images a run keeps
            "subgroups",  # which columns of an index it keeps with them
        }
    ),
}

#: Where images are read from and kept decoded, of sources at any depth of :data:`SOURCES`.
FOLDERS_OF_IMAGES = frozenset({"root", "cache"})
SOURCES = ("data.source.", "data.ood.")

#: A key of one of these names with None is as good as absent: older configurations do not have it.
LATER_KEYS = frozenset(
    {
        "delivery",
        "bits",
        "evaluate_local",
        "metrics",
        "label_flipping",
        "record_privacy",
        "ood",
        "corruptions",
        "class_templates",
        "network_rounds",
        "rank",
        "test_shots",
        "pool_seed",
        "source_shots",
        "head_mu",
        "head_finetuning",
    }
)

#: A key of one of these names with this value is as good as absent: older configurations do not have it.
LATER_DEFAULTS = {"min_support": 1, "train_backbone": True, "score_all": True}

#: A key of one of these names with None is hashed as this value, which older configurations write out.
WRITTEN_OUT = {"pretrained_tag": "openai"}

#: A folder under this key, in which features are kept for other runs, is as good as none.
FOLDER_OR_AUTO = "data.cache_features"

#: Left out of a split's hash: one split may be run on images of several sizes, and older manifests have none.
OF_THE_IMAGES = "images_sha256"

#: What a configuration is hashed with, on however many devices and machines its clients were shared out.
ON_ONE_DEVICE = {"devices": 1, "num_nodes": 1}

#: The Trainer's settings, with their defaults, that a run may have otherwise when it goes on, at the same numbers.
OF_ONE_SITTING = {**ON_ONE_DEVICE, "max_time": None, "strategy": "auto"}


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value that hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def manifest_hash(manifest: dict[str, Any]) -> str:
    """sha256 of a partition's manifest in a canonical spelling (hexadecimal); equal for equal partitions.

    :data:`OF_THE_IMAGES` is left out.
    """
    return hashlib.sha256(canonical({name: v for name, v in manifest.items() if name != OF_THE_IMAGES})).hexdigest()


def is_result_free(key: str) -> bool:
    """Return whether the value under a dotted key of a configuration cannot change a result.

    It depends on the place: ``data.subgroups`` cannot, and an argument ``subgroups`` of a class can.
    """
    section, _, name = key.rpartition(".")
    return name in RESULT_FREE.get(section, ()) or (name in FOLDERS_OF_IMAGES and section.startswith(SOURCES))


def config_hash(config: dict[str, Any]) -> str:
    """sha256 of a resolved configuration, without what cannot change a result (:func:`is_result_free`).

    The rounds, the seed, the kind of device and the precision stay in. Several devices give one device's numbers, and
    have its hash.
    """

    def kept(value: Any, place: str = "") -> Any:
        if isinstance(value, dict):
            absent = {key for key in LATER_KEYS if value.get(key) is None}
            absent |= {key for key, usual in LATER_DEFAULTS.items() if value.get(key) == usual}
            given = {key: WRITTEN_OUT.get(key) if entry is None else entry for key, entry in value.items()}
            at = {key: f"{place}.{key}".lstrip(".") for key in given if key not in absent}
            return {str(key): kept(given[key], where) for key, where in at.items() if not is_result_free(where)}
        if isinstance(value, list | tuple):
            return [kept(entry, place) for entry in value]
        return "auto" if place == FOLDER_OR_AUTO and isinstance(value, str) else value

    trainer = config.get("trainer")
    if isinstance(trainer, dict):
        alone = {name: value for name, value in ON_ONE_DEVICE.items() if name in trainer}
        config = {**config, "trainer": {**trainer, **alone}}
    return hashlib.sha256(canonical(kept(config))).hexdigest()
