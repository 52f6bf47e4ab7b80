"""The reward of the learning matrix: right or wrong, with its parts and steps for the algorithms that look at them."""

from __future__ import annotations


def right(responses, labels):
    """1 for the whole answer, else 0."""
    return [float(response == label) for response, label in zip(responses, labels, strict=True)]


def parts(responses, labels):
    """The same reward with two parts: the sum and the check digit."""
    return [
        {
            "reward": float(response == label),
            "parts": {"sum": float(response[:3] == label[:3]), "check": float(response[3:] == label[3:])},
        }
        for response, label in zip(responses, labels, strict=True)
    ]


def steps(responses, labels):
    """The same reward given where it is decided: after the sum, and after the check digit."""
    return [
        {
            "reward": float(response == label),
            "steps": [(3, float(response[:3] == label[:3])), (4, float(response == label))],
        }
        for response, label in zip(responses, labels, strict=True)
    ]
