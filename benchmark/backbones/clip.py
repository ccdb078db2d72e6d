"""Two-tower models through open_clip: ViT-B-16, RN50, ViT-B-16-SigLIP, or the embedded ``micro_clip``."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from benchmark.backbones.hub_tokenizer import HubTokenizer
from benchmark.backbones.weights import unfit_tensors
from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.seeds import derived_seed

if TYPE_CHECKING:  # open_clip takes seconds to import, and reading the command line must not wait for it
    from open_clip import CLIP, CoCa, CustomTextCLIP, SimpleTokenizer

    OpenCLIP: TypeAlias = CLIP | CoCa | CustomTextCLIP

MICRO = "micro_clip"
#: Tokenizers by their models' names: 49,000 words take a tenth of a second to read, and nothing changes them.
_READ: dict[str, "SimpleTokenizer"] = {}
MICRO_PREPROCESSING: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def load_clip(
    name: str = MICRO,
    weights: Literal["hub", "file", "random", "embedded"] = "embedded",
    pretrained_tag: str | None = None,
    checkpoint_path: str | None = None,
    image_size: int | None = None,
) -> tuple["OpenCLIP", Any]:
    """A frozen model of open_clip in eval mode, and its tokenizer: open_clip's own, or a ``HubTokenizer``.

    ``model.visual.image_mean`` and ``image_std`` are those that the weights were trained with, for pixels in
    [0, 1]. CoCa comes without its decoder of captions.

    Args:
        name: open_clip's name of the architecture, such as ``ViT-B-16`` or ``RN50``, or ``micro_clip``.
        weights: ``hub`` (downloaded by open_clip), ``file``, ``random`` (initial values, always the same ones),
            or ``embedded`` (the demo weights of ``micro_clip`` that come with this package).
        pretrained_tag: open_clip's name of the weights; None is ``openai`` for ``hub`` and ``random`` (for ``random``
            the first tag of a name without it). It also says which pixels and which activation they expect (OpenAI's
            need QuickGELU). So a ``file`` needs the tag of the weights that it holds or began from, unless all weights
            of this name expect the same, as those of ``ViT-B-32-quickgelu`` do. ``micro_clip`` has no tags. A name
            without any has ``random`` weights alone, for OpenAI's pixels.
        checkpoint_path: for ``file``: .safetensors, or a torch file with nothing but tensors.
        image_size: side of the square input in pixels; None is the model's own. A ViT's position embeddings are
            interpolated to it; a ResNet with weights keeps its own size.

    Raises:
        ConfigurationError: no such model, tag, file or image size; weights that cannot be downloaded or read; a file
            that does not fit the model, or whose tag is not given where it matters; a text tower or a tokenizer of
            Hugging Face's that is not there.
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

    import open_clip

    from benchmark.backbones.micro import micro_clip_path

    needed = weights == "file" and pretrained_tag is None and name != MICRO
    tag = _only_tag(name) if needed else pretrained_tag or _usual_tag(name, weights)
    preprocessing = _preprocessing(name, tag)
    config = open_clip.get_model_config(name)
    if "hf_model_name" in config["text_cfg"]:
        raise ConfigurationError(
            f"{name!r} has a text tower of Hugging Face's ({config['text_cfg']['hf_model_name']}), which takes no "
            "context here; use a model whose text tower is open_clip's own, such as ViT-B-16"
        )
    tokenizer = _tokenizer(name)
    model = _build(name, config, preprocessing, weights, image_size)
    resize = image_size is not None
    if weights == "embedded":
        _load_file(model, name, micro_clip_path(), resize)
    elif weights == "hub":
        assert tag is not None
        _load_file(model, name, _download(name, tag), resize)
    elif checkpoint_path is not None:
        _load_file(model, name, user_path(checkpoint_path), resize)
    if isinstance(model, open_clip.CoCa):
        del model.text_decoder  # it writes captions, and has values that open_clip leaves uninitialised
    model.requires_grad_(False).eval()
    if image_size is not None and "timm_model_name" in config["vision_cfg"]:
        _resize_timm(model, name, image_size)
    return model, tokenizer


def _usual_tag(name: str, weights: str) -> str | None:
    """Return the tag of a name where none is given: OpenAI's; for random weights the first one, or None if none is."""
    import open_clip

    known = open_clip.list_pretrained_tags_by_model(name)
    return "openai" if weights != "random" or "openai" in known else next(iter(known), None)


def _tokenizer(name: str) -> "SimpleTokenizer | HubTokenizer":
    """Return open_clip's own tokenizer, read once in a process, or that of Hugging Face which a model names."""
    import open_clip

    if name in _READ:
        return _READ[name]
    try:
        made = open_clip.get_tokenizer(name)
    except Exception as error:  # the hub's client and the readers of its files fail in many ways
        source = open_clip.get_model_config(name)["text_cfg"].get("hf_tokenizer_name", "named after it")
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise ConfigurationError(
            f"the tokenizer of {name!r} is Hugging Face's {source} and cannot be loaded ({said}): pip install "
            "transformers, and load it once where the hub can be reached, or copy it into the hub's cache; or use a "
            "model with open_clip's own tokenizer, such as ViT-B-16"
        ) from error
    if not isinstance(made, open_clip.SimpleTokenizer):
        return HubTokenizer(made)
    return _READ.setdefault(name, made)


def _resize_timm(model: "OpenCLIP", name: str, image_size: int) -> None:
    """Have an image tower of timm's take other images, as open_clip does it: after its weights are loaded."""
    device = model.logit_scale.device
    try:
        model.visual.set_input_size(image_size)
        with torch.no_grad():
            model.visual(torch.zeros(1, 3, image_size, image_size, device=device))
    except Exception as error:  # each architecture fails in its own way
        raise ConfigurationError(
            f"the image tower of {name!r} cannot take images of {image_size} pixels: {type(error).__name__}: {error}; "
            "leave image_size out, or give a multiple of its patches"
        ) from error


def _preprocessing(name: str, tag: str | None) -> dict[str, Any]:
    """open_clip's entry for these weights: ``mean`` and ``std`` of the pixels, ``quick_gelu`` where it is needed."""
    import open_clip

    from benchmark.backbones.micro import micro_clip_config_path

    if name == MICRO:
        if MICRO not in open_clip.list_models():
            open_clip.add_model_config(micro_clip_config_path())
        return MICRO_PREPROCESSING
    _check_name(name)
    if tag is None:
        return {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
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


def _build(
    name: str, config: dict[str, Any], preprocessing: dict[str, Any], weights: str, image_size: int | None
) -> "OpenCLIP":
    """The model with initial weights."""
    import open_clip
    from open_clip.model import set_model_preprocess_cfg

    custom, vision = config.pop("custom_text", False), config["vision_cfg"]
    kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP if custom else open_clip.CLIP
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False  # timm would ask its hub
    elif image_size is not None:
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
        model = kind(**config)
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


def _load_file(model: "OpenCLIP", name: str, path: Path, resize: bool) -> None:
    """Load a file of weights into the model; every tensor must fit, position embeddings after they are resized."""
    from open_clip.factory import load_state_dict
    from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed

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
        if not hasattr(model, "token_embedding"):  # older files have the text tower's tensors without ``text.``
            state = convert_to_custom_text_state_dict(state)
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
