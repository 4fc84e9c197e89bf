"""Proposers guess the next tokens of rows. The step that computes a row's next token verifies the guesses."""

from jaxvllm.runtime.proposers.proposer import Drafts, HistoryProposer, Known, Proposer, SeenStep

__all__ = ["Drafts", "SeenStep", "HistoryProposer", "Known", "Proposer"]
