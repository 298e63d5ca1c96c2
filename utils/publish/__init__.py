"""Publication of a finished model.

model_card  the README.md of final/ and adapter/
hub         upload to the Hub, by python -m utils.publish.hub or `push_to_hub` in a recipe
evaluate    lm-evaluation-harness, by python -m utils.publish.evaluate or `lm_eval_tasks`
"""
