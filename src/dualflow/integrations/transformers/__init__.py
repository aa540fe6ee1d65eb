"""Dual-Flow models in the `transformers` library. Importing this registers them there:
``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM`` then read dualflow's model folders.

``configuration_dualflow`` and ``modeling_dualflow``, with the files they import, stand on their
own: they import nothing of dualflow and are written into folders that others load without it.
"""

from dualflow.extras import require_extra

require_extra("transformers", "transformers", "using dualflow models in transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from dualflow.integrations.transformers.backbone_dualflow import DualFlowModel  # noqa: E402
from dualflow.integrations.transformers.configuration_dualflow import DualFlowConfig  # noqa: E402
from dualflow.integrations.transformers.modeling_dualflow import DualFlowForCausalLM  # noqa: E402

__all__ = ["DualFlowConfig", "DualFlowForCausalLM", "DualFlowModel"]

AutoConfig.register(DualFlowConfig.model_type, DualFlowConfig, exist_ok=True)
AutoModel.register(DualFlowConfig, DualFlowModel, exist_ok=True)
AutoModelForCausalLM.register(DualFlowConfig, DualFlowForCausalLM, exist_ok=True)

# What ``save_pretrained`` writes can then be loaded where dualflow is not installed.
DualFlowConfig.register_for_auto_class()
DualFlowModel.register_for_auto_class("AutoModel")
DualFlowForCausalLM.register_for_auto_class("AutoModelForCausalLM")
