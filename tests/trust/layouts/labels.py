"""Labels of real training scripts and frameworks, and of networks that have the letters of others
in their names.

Judged by hand. Each row: the label, whether it names a training state, whether it names a number of
the training.
"""

from __future__ import annotations

_TRAINING = """
    optimizer optimizers optimiser optimisers optim optims optimizer_state_dict optimizer_states
    optim_state_dict OptimizerState optimizerState optimizer-state model_optimizer g_optimizer
    D_optimizer optimizer_0 optimizer_state_dict_1 sgd_optimizer scheduler schedulers optimizer_cpu
    scheduler_state_dict lr_scheduler lr_schedulers opt_param_scheduler param_schedulers
    warmup_scheduler LRScheduler rng rngs rng_state rng_states torch_rng_state cuda_rng_state
    cuda_rng_state_all cpu_rng_state random random_state random_states_0 python_random_state
    np_random_state numpy_random_state torchRngState rng_state_dict rng_state_cuda rng_state_torch_0
    randomState random_state_python encoder_optimizer
"""
"""States of optimizers, schedulers and random generators."""

_NUMBERS = """
    epoch epochs global_step total_steps globalStep iter_num iteration best_acc1 best_prec1 bestAcc
    best_val_loss val_loss testLoss best_metric best_score best_fitness miou PSNR val_psnr FID
    fid_score top5 acc1 elapsed_time ntokens_seen train_samples seed torch_manual_seed lr base_lr
    amp_scaler grad_scaler loss_scaler grad_norm train_hist history step_size time_embedding
    token_embedding best_model optimizer_step optimizer_steps
    scheduler_steps metrics val-losses val/loss mAP map f1 F1 val_f1 num_updates n_averaged mse RMSE
    rewards count loss_and_acc val/acc@0.5 lr_sched
"""
"""Numbers of the training, or labels with such a word in them: only tensors of one element count,
so these do no harm.
"""

_BOTH = {"lr_scheduler", "lr_schedulers", "LRScheduler"}
"""States that also have the word of a number in their labels."""

_NEITHER = """
    upscaler optimized_model random_encoder resampler upsampler sampler scheduler_net optimus
    optical strings ring warmup_net optimal_policy opt_decoder optimizer_net rng_encoder optimG
    optimizer_G optimizer_gen gan_opt_d netDmodel current_model_state averaging_state
    scaler target_scaler averaged stopwatch stepsize_ratio lossless epochal timer topology toptagger
    accent bestiary
    scorer learning_rate mean std logit_scale temperature shadow prediction_net randomness schedule
    fidelity opt opt_state sched target_random random_0 random_all model_and_optimizer
    optimizer_and_scheduler discriminator.optimizer net.rng loss_weight running_loss loss.avg
    precision@0.5 bias_correction accuracy_weight mapper counter decayed f12 state_dict cuda torch
"""
"""Networks, and what has the letters of a training state or a number but not its word; keys of
modules.
"""


def table() -> list[tuple[str, bool, bool]]:
    """Every label, whether it names a training state, whether it names a number."""
    training, numbers, neither = (set(text.split()) for text in (_TRAINING, _NUMBERS, _NEITHER))
    return [
        (label, label in training, label in numbers | _BOTH)
        for label in sorted(training | numbers | neither)
    ]
