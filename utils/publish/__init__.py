"""A finished model for others.

model_card  the README.md of final/ and adapter/
hub         python -m utils.publish.hub: upload to the Hub; push_to_hub
evaluate    python -m utils.publish.evaluate: lm-evaluation-harness; lm_eval_tasks
"""
