"""CLIP models through open_clip: ViT-B-16, RN50, or the embedded ``micro_clip``."""

import textwrap
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from benchmark.backbones.weights import unfit_tensors
from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.seeds import derived_seed

if TYPE_CHECKING:  # open_clip takes seconds to import, and reading the command line must not wait for it
    from open_clip import CLIP, SimpleTokenizer

MICRO = "micro_clip"
MICRO_PREPROCESSING: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def load_clip(
    name: str = MICRO,
    weights: Literal["hub", "file", "random", "embedded"] = "embedded",
    pretrained_tag: str | None = None,
    checkpoint_path: str | None = None,
    image_size: int | None = None,
) -> tuple["CLIP", "SimpleTokenizer"]:
    """A frozen CLIP model in eval mode, and its tokenizer.

    ``model.visual.image_mean`` and ``image_std`` are those that the weights were trained with, for pixels in
    [0, 1].

    Args:
        name: open_clip's name of the architecture, such as ``ViT-B-16`` or ``RN50``, or ``micro_clip``.
        weights: ``hub`` (downloaded by open_clip), ``file``, ``random`` (initial values, always the same ones),
            or ``embedded`` (the demo weights of ``micro_clip`` that come with this package).
        pretrained_tag: open_clip's name of the weights; None is ``openai`` for ``hub`` and ``random``. It also says
            which pixels and which activation they expect (OpenAI's need QuickGELU). So a ``file`` needs the tag of the
            weights that it holds or began from, unless all weights of this name expect the same, as those of
            ``ViT-B-32-quickgelu`` do. ``micro_clip`` has no tags.
        checkpoint_path: for ``file``: .safetensors, or a torch file with nothing but tensors.
        image_size: side of the square input in pixels; None is the model's own. A ViT's position embeddings are
            interpolated to it; a ResNet with weights keeps its own size.

    Raises:
        ConfigurationError: no such model, tag, file or image size; weights that cannot be downloaded or read; a file
            that does not fit the model, or whose tag is not given where it matters.
    """
    if weights not in ("hub", "file", "random", "embedded"):
        raise ConfigurationError(f"weights is hub, file, random or embedded, got {weights!r}")
    if (weights == "file") != (checkpoint_path is not None):
        raise ConfigurationError(
            f"weights={weights!r} with checkpoint_path={checkpoint_path!r}: a path is given with weights='file', "
            "and only then"
        )
    if weights == "embedded" and name != MICRO:
        raise ConfigurationError(
            f"embedded weights exist for {MICRO} only, got name={name!r}; use weights='hub' or weights='file'"
        )
    if weights == "hub" and name == MICRO:
        raise ConfigurationError(f"{MICRO} has no weights on a hub; use weights='embedded'")

    from benchmark.backbones.micro import micro_clip_path

    needed = weights == "file" and pretrained_tag is None and name != MICRO
    tag = _only_tag(name) if needed else pretrained_tag or "openai"
    preprocessing = _preprocessing(name, tag)
    model = _build(name, preprocessing, weights, image_size)
    tokenizer = _tokenizer(name)
    resize = image_size is not None
    if weights == "embedded":
        _load_file(model, name, micro_clip_path(), resize)
    elif weights == "hub":
        _load_file(model, name, _download(name, tag), resize)
    elif checkpoint_path is not None:
        _load_file(model, name, user_path(checkpoint_path), resize)
    return model.requires_grad_(False).eval(), tokenizer


@lru_cache(maxsize=8)
def _tokenizer(name: str) -> "SimpleTokenizer":
    """Read a model's tokenizer once in a process: its 49,000 words take a tenth of a second, and nothing changes it."""
    import open_clip

    return open_clip.get_tokenizer(name)


def _preprocessing(name: str, tag: str) -> dict[str, Any]:
    """open_clip's entry for these weights: ``mean`` and ``std`` of the pixels, ``quick_gelu`` where it is needed."""
    import open_clip

    from benchmark.backbones.micro import micro_clip_config_path

    if name == MICRO:
        if MICRO not in open_clip.list_models():
            open_clip.add_model_config(micro_clip_config_path())
        return MICRO_PREPROCESSING
    _check_name(name)
    entry = open_clip.get_pretrained_cfg(name, tag)
    if not entry:
        known = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
        raise ConfigurationError(f"open_clip knows no weights {tag!r} of {name!r}; pretrained_tag is one of: {known}")
    return entry


def _check_name(name: str) -> None:
    import open_clip

    if name not in open_clip.list_models():
        raise ConfigurationError(
            f"open_clip {open_clip.__version__} has no model {name!r}; names are such as ViT-B-16, RN50, {MICRO}"
        )


def _only_tag(name: str) -> str:
    """Return a tag of a name all of whose weights expect one activation and one kind of pixels.

    Raises:
        ConfigurationError: they expect different ones, which a file does not tell, or there are none.
    """
    import open_clip

    _check_name(name)
    quick = open_clip.get_model_config(name).get("quick_gelu", False)
    tags: dict[tuple[Any, ...], list[str]] = {}
    for tag in open_clip.list_pretrained_tags_by_model(name):
        entry = open_clip.get_pretrained_cfg(name, tag)
        kind = (quick or entry.get("quick_gelu", False), *(tuple(entry[key]) for key in ("mean", "std")))
        tags.setdefault(kind, []).append(tag)
    if len(tags) == 1 and all(kind[0] == quick for kind in tags):
        return tags.popitem()[1][0]
    choices = [
        f"{', '.join(of_kind[:3])}{', ...' * (len(of_kind) > 3)} ({'QuickGELU' if fast else 'GELU'}, pixels of mean "
        f"{', '.join(f'{value:.3f}' for value in mean)})"
        for (fast, mean, _), of_kind in tags.items()
    ]
    raise ConfigurationError(
        f"a file of weights of {name!r} does not tell which activation and pixels they were trained with: give "
        f"pretrained_tag, that of the weights which it holds or began from: {'; '.join(choices) or 'none is known'}"
    )


def _build(name: str, preprocessing: dict[str, Any], weights: str, image_size: int | None) -> "CLIP":
    """The model with initial weights."""
    import open_clip
    from open_clip.model import set_model_preprocess_cfg

    config = open_clip.get_model_config(name)
    text = config["text_cfg"]
    another = "hf_model_name" in text or "hf_tokenizer_name" in text or "multimodal_cfg" in config
    if config.pop("custom_text", False) or another:
        raise ConfigurationError(f"{name!r} has a text tower of another kind than CLIP's; use one such as ViT-B-16")
    if "timm_model_name" in config["vision_cfg"]:
        raise ConfigurationError(f"{name!r} has an image tower of timm's; use one of CLIP's own, such as ViT-B-16")
    if image_size is not None:
        vision = config["vision_cfg"]
        resnet = isinstance(vision["layers"], list)
        unit = 32 if resnet else vision["patch_size"]
        if image_size < unit or image_size % unit:
            raise ConfigurationError(f"image_size={image_size} is not a multiple of {unit}, as {name!r} needs it")
        if resnet and weights != "random" and image_size != vision["image_size"]:
            raise ConfigurationError(
                f"the weights of {name!r} are for images of {vision['image_size']} pixels, got "
                f"image_size={image_size}; only a ViT's can be interpolated"
            )
        vision["image_size"] = image_size
    config["quick_gelu"] = config.get("quick_gelu", False) or preprocessing.get("quick_gelu", False)
    # Building draws initial values from torch's global generator: key it, and leave it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed("initial weights", name))
        model = open_clip.CLIP(**config)
    set_model_preprocess_cfg(model, preprocessing)
    return model


def _download(name: str, tag: str) -> Path:
    """Download a tag's weights with open_clip and return their path.

    Raises:
        ConfigurationError: the download fails.
    """
    import open_clip

    entry = open_clip.get_pretrained_cfg(name, tag)
    try:
        return Path(open_clip.download_pretrained(entry))
    except Exception as error:  # the hub's client and the downloader fail in many ways
        place = entry.get("hf_hub", "").rstrip("/") or entry.get("url")
        raise ConfigurationError(
            f"the weights {tag!r} of {name!r} could not be downloaded: {type(error).__name__}: {error}. Get "
            f"open_clip_model.safetensors of {place} on a machine that can, and pass weights='file' with its "
            "checkpoint_path"
        ) from error


def _load_file(model: "CLIP", name: str, path: Path, resize: bool) -> None:
    """Load a file of weights into the model; every tensor must fit, position embeddings after they are resized."""
    from open_clip.factory import load_state_dict
    from open_clip.model import resize_pos_embed

    from benchmark.backbones.micro import IDS_KEY, expand_token_rows

    if not path.is_file():
        raise ConfigurationError(
            f"{path}: no such file; the weights of {name!r} are expected there: give their file as the backbone's "
            "checkpoint_path, or weights=hub, which downloads them"
        )
    whole = [IDS_KEY, *(key for key, value in model.state_dict().items() if not value.is_floating_point())]
    try:
        state = load_state_dict(str(path), device="cpu", weights_only=True)
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("it holds more than tensors")
        unfit = unfit_tensors(state, whole)
        state = state if unfit else expand_token_rows(state)
        if resize and not unfit:  # half precision cannot be interpolated
            state = {key: value.float() for key, value in state.items()}
            resize_pos_embed(state, model)
    except Exception as error:  # readers of damaged or foreign files fail in many ways
        raise ConfigurationError(
            f"{path}: cannot be read as weights of {name!r} ({type(error).__name__}: {error}); a .safetensors file or "
            "a torch file with nothing but tensors is expected (OpenAI's own .pt is a program: take the .safetensors)"
        ) from error
    if unfit:
        raise ConfigurationError(f"{path}: not weights of {name!r}: {textwrap.shorten('; '.join(unfit), 400)}")
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ConfigurationError(f"{path}: not weights of {name!r}: {textwrap.shorten(str(error), 400)}") from error
