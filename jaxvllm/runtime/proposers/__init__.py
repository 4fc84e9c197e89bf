"""Proposers guess the next tokens of rows. The step that computes a row's next token verifies the guesses."""

from jaxvllm.runtime.proposers.proposer import Drafts, Followed, HistoryProposer, Known, Proposer

__all__ = ["Drafts", "Followed", "HistoryProposer", "Known", "Proposer"]
