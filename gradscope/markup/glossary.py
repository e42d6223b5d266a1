"""The terms of gradscope's pages, each explained in one sentence."""

import re
from html import escape

from gradscope.core.texts import visible

_SNR = "The squared norm of the mean gradient divided by the variance of the gradients around it."
_NOISE_SCALE = (
    "The batch size at which the noise of the batch gradient is as large as its signal. "
    "Larger batches gain little."
)
_OPPOSED = (
    "The share of samples whose gradient has a negative dot product with the mean gradient. "
    "A step that lowers the mean loss raises the loss of these samples."
)
_COSINE = (
    "The cosine of the angle between two gradients: "
    "1 for the same direction, 0 for unrelated directions, -1 for opposite directions."
)
_HELPED = (
    "The training samples with the largest positive scores. "
    "Without them, the model's loss on the query would be higher."
)
_HARMED = (
    "The training samples with the most negative scores. "
    "Without them, the model's loss on the query would be lower."
)

TERMS = {
    # gradients
    "norm": "The length (L2 norm) of a sample's gradient over all parameters.",
    "mean norm": "The mean of the samples' gradient norms.",
    "median norm": "The median of the samples' gradient norms.",
    "largest norm": "The largest gradient norm of any sample.",
    "norm of mean": "The norm of the mean gradient, in which opposite gradients cancel.",
    "times median": "The norm of the sample's gradient divided by the median norm.",
    "share": "The parameter's part of the sum of all squared gradient norms.",
    "entries": "The number of entries of the parameter.",
    "margin": "The log-odds of the target class: positive if its probability is above one half.",
    "cosine": _COSINE,
    "mean cosine": "The mean cosine of the samples' gradients with the mean gradient.",
    "cosine of mean": "The cosine of the class's mean gradient with the mean gradient of all data.",
    "cosine of means": "The cosine of the mean gradients in the two files.",
    "cosine with the mean gradient": _COSINE,
    "opposed": _OPPOSED,
    "change": "The norm of the difference of the sample's gradients in the two files.",
    "distance": "The norm of the difference of two gradients divided by the larger norm.",
    "largest gradient": "A sample with a very large gradient dominates the mean gradient.",
    "clipping norm": "The norm above which a gradient would be scaled down, and its effect.",
    "check labels": "Samples with large losses are often mislabelled.",
    "Fisher trace": "The mean of the squared gradient norms.",
    "Jensen gap": (
        "The difference between the mean of the transformed gradients "
        "and the transformation of the mean gradient."
    ),
    # noise
    "SNR": _SNR,
    "signal to noise": _SNR,
    "mean over entries": "The signal to noise of each value of the gradient, averaged.",
    "noise": "The variance of the gradients of one class around their mean.",
    "noise scale": _NOISE_SCALE,
    "batch size": _NOISE_SCALE,
    "trace of covariance": "The variance of the gradients, summed over all values.",
    "gradient norm squared": (
        "An unbiased estimate of the squared norm of the true mean gradient. It may be negative."
    ),
    "norm test": (
        "The variance of the mean gradient divided by its squared norm. "
        "The batch is large enough for a tolerance θ if this is at most θ²."
    ),
    "inner-product test": "The part of the norm test along the direction of the mean gradient.",
    "orthogonality test": "The part of the norm test at right angles to the mean gradient.",
    "CABS batch size": (
        "The batch size for plain SGD that balances the variance of the gradient with the descent "
        "at the learning rate (Balles et al. 2017)."
    ),
    "evidence to stop": (
        "Positive if the mean gradient is no larger than noise alone would make it "
        "(Mahsereci et al. 2017)."
    ),
    "effective rank": "The number of directions that the gradients use, weighted by size.",
    "directions for 90%": (
        "The smallest number of orthogonal directions that hold 90% of the squared gradient norms."
    ),
    "what learns": (
        "The parameters whose mean gradient is larger than noise alone would make it. "
        "In the other parameters, the samples' gradients cancel."
    ),
    # trainings
    "95%": "An interval that contains the true noise scale with a probability of 95%.",
    "overhead": "The time of all measurements divided by the time of the training without them.",
    # attribution
    "score": (
        "The effect of the training sample on the query's loss, in the unit that is shown. "
        "Positive samples helped, negative samples harmed."
    ),
    "helped most": _HELPED,
    "harmed most": _HARMED,
    "self-influence": (
        "The score of a training sample for its own loss. "
        "Large values mark samples that are unusual or mislabelled."
    ),
    "curvature": "How the loss bends around the weights; scores divide gradients by it.",
    "damping": "A constant added to the curvature so that dividing by it is stable.",
    "LDS": (
        "The linear datamodeling score: the rank correlation of predicted losses "
        "with the losses of models retrained on random subsets."
    ),
    # files
    "certificate": "The proof that the gradients of a batch equal those of autograd.",
    "audits": "Later batches whose gradients were proved again.",
    "chain": "The transformations of each gradient, and the form in which results are stored.",
    "unused": "Parameters that have no gradient because no sample's loss depends on them.",
}
_FOUND = {term.casefold(): text for term, text in TERMS.items()}
_QUALIFIED = re.compile(r", | \(")  # before what qualifies a term: "mean norm, first"


def explained(term: str) -> str:
    """Return the HTML of a term, with its explanation on hover, focus and touch if it has one."""
    shown, name = escape(visible(term)), term.casefold()
    text = _FOUND.get(name) or _FOUND.get(_QUALIFIED.split(name)[0])
    return shown if text is None else f'<abbr title="{escape(text)}" tabindex="0">{shown}</abbr>'
