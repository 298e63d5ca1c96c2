r"""Fine-tune a causal language model on conversations or prompts with completions, full or LoRA.

    python sft_train.py --config recipes/sft/demo_cpu.yaml
    python sft_train.py --model_name_or_path Qwen/Qwen3-0.6B \
        --train_data data/my-chats/train --output_dir runs/my-chats --dry_run
    slurm/launch_node.sh sft_train.py --config recipes/sft/qwen3_8b_lora.yaml --learning_rate 1e-4

Flags win over recipes; an unknown key in either is an error. `--dry_run` checks everything, says
what will happen and stops before weights are loaded. The same command resumes a run that stopped.
"""

import sys

from utils.launch.entry import start


def main(argv: list[str] | None = None) -> int:
    """Run one fine-tuning job, from its recipe to a saved model; return the exit code."""
    from utils.launch.script import configure_environment

    configure_environment()  # before the libraries below read it
    from utils.config.settings import parse_fine_tuning

    settings = parse_fine_tuning(argv, description=__doc__)  # before the slow imports below
    from utils.model.config import load_model_config
    from utils.model.weights import load_model
    from utils.plan.run_data import choose_sizes, load_run_data, load_run_tokenizer
    from utils.plan.run_plan import log_plan, plan_run
    from utils.run.raw_data import prepare_raw_data
    from utils.run.staging import stage_data
    from utils.run.start import check_start, start_process

    launch = start_process(settings)
    prepare_raw_data(settings)
    settings = stage_data(settings, launch)
    tokenizer = load_run_tokenizer(settings)
    config = load_model_config(settings, tokenizer)
    settings = choose_sizes(settings, config, launch)
    data = load_run_data(settings, tokenizer, config, fine_tuning=True)
    plan = plan_run(settings, data, config, launch)
    log_plan(plan)
    if settings.run.dry_run:
        return check_start(plan, data, config, launch)
    from utils.launch.processes import check_running_strategy
    from utils.run.finish import finish_run, leave_run, run_callbacks
    from utils.run.start import start_run
    from utils.training.fine_tune_trainer import FineTuneTrainer

    run, checkpoints = start_run(plan, data, launch)
    if run.finished:
        return 0
    trainer = FineTuneTrainer(
        load_model(
            settings, config, plan.attention, plan.quantized, data.new_tokens, run.weights_from
        ),
        tokenizer,
        plan.training_arguments(run.run_id),
        plan,
        data,
        run_callbacks(plan, data, launch, run, checkpoints),
    )
    check_running_strategy(launch)
    trainer.train(resume_from_checkpoint=run.resume_from)
    code = finish_run(trainer, plan.save_dtype)
    del trainer  # benchmarks of final/ need its memory
    return leave_run(settings, launch, code)


if __name__ == "__main__":
    sys.exit(start(main, __doc__, announced=True))
