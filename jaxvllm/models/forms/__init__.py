"""The forms in which matrices of weights are kept on devices, each in one file, and the choice among them."""

from jaxvllm.models.forms.choice import PLAIN_FORMS, QUANTIZATIONS, Forms
from jaxvllm.models.forms.form import Form, Matrix
from jaxvllm.models.forms.plain import PLAIN

__all__ = ["PLAIN", "PLAIN_FORMS", "QUANTIZATIONS", "Form", "Forms", "Matrix"]
