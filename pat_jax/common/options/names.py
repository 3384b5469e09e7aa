"""What somebody may have meant by a name that is not there: a slip, or a neighbour's word for it."""

from collections.abc import Collection
from difflib import get_close_matches

from pat_jax.common.errors import UserError

# One line for one thing: our words first, then those of TRL, verl, OpenRLHF, Tunix, vLLM, OpenAI and
# transformers.
_SAME = tuple(
    line.split()
    for line in """
    model model_name_or_path model_path model_name pretrained_model_name_or_path pretrain
    data dataset dataset_name dataset_path train_files train_file train_data prompt_data
    reward reward_funcs reward_fn reward_function custom_reward_function reward_manager
    run_dir out output_dir default_local_dir save_path ckpt_path checkpoint_dir output_file \
        run_name experiment_name
    trackers report_to logger loggers use_wandb
    tracker_project project_name wandb_project
    log_samples_every log_completions_steps completions_log_steps num_completions_to_log
    prompts input_file input prompts_file
    resume resume_from_checkpoint resume_mode load_checkpoint
    epochs num_train_epochs total_epochs num_epochs max_epochs steps
    text_key dataset_text_field text_column
    steps max_steps num_steps total_steps total_training_steps
    prompts_per_step batch batch_size train_batch_size rollout_batch_size global_batch_size \
        per_device_train_batch_size generation_batch_size max_num_seqs
    max_completion_length max_tokens max_new_tokens max_completion_tokens max_response_length \
        max_response response_length max_output_tokens max_gen_len generate_max_len
    min_completion_length min_tokens min_new_tokens
    max_prompt_length max_prompt prompt_max_len max_input_length
    max_length max_model_len max_seq_length context_length
    num_generations n num_samples samples_per_prompt num_return_sequences group_size \
        n_samples_per_prompt num_generations_per_prompt num_samples_per_prompt best_of
    responses sequences num_sequences num_responses
    top_p nucleus
    stop stop_strings stop_sequences
    logprobs top_logprobs
    reward_skip_special_tokens skip_special_tokens
    repetition_penalty repeat_penalty
    compute_dtype dtype torch_dtype model_dtype bf16 precision
    weights quantization load_in_8bit
    layout tensor_parallel_size tensor_model_parallel_size tp_size tp data_parallel_size dp_size
    devices num_gpus num_devices n_gpus_per_node
    device_memory_gib gpu_memory_utilization mem_fraction_static
    remat gradient_checkpointing enable_gradient_checkpointing activation_checkpointing remat_policy
    scan_layers scan unroll_layers scan_blocks
    weight_dtype param_dtype master_dtype master_weight_dtype
    moment_dtype mu_dtype adam_dtype
    optimizer.offload optimizer_offload offload_optimizer cpu_offload optimizer_cpu_offload
    page_size block_size
    epsilon clip_ratio clip_ratio_low cliprange clip_eps epsilon_low eps_clip
    epsilon_high clip_ratio_high eps_clip_high
    delta dual_clip clip_ratio_c eps_clip_c
    algorithm.name adv_estimator advantage_estimator
    ratio importance_sampling_level
    surrogate policy_loss
    kl_in use_kl_in_reward kl_in_reward
    kl_estimator kl_penalty kl_loss_type
    entropy_coef entropy_coeff entropy_loss_coef
    rollout_correction vllm_importance_sampling_mode rollout_is tis use_tis
    rollout_correction_cap vllm_importance_sampling_cap rollout_is_threshold tis_imp_ratio_cap
    dynamic_sampling filter_groups max_num_gen_batches dynamic_filtering
    overlong_buffer overlong_buffer_len soft_punish_cache
    overlong_penalty overlong_penalty_factor
    beta kl_coef kl_loss_coef kl_beta init_kl_coef
    num_iterations ppo_epochs num_ppo_epochs inner_epochs mu
    mini_batch_size ppo_mini_batch_size
    tokens_per_micro_batch ppo_max_token_len_per_gpu max_tokens_per_gpu ppo_micro_batch_size \
        micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size
    share_prompts use_prefix_grouper prefix_grouper prefix_sharing shared_prefix
    scale_rewards norm_adv_by_std_in_grpo scale_advantages
    loss_aggregation loss_agg_mode loss_type
    truncated mask_truncated_completions overlong_filtering
    optimizer.learning_rate lr actor_lr actor_learning_rate
    schedule lr_scheduler_type lr_scheduler lr_decay_style
    warmup_steps lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps_ratio
    b1 adam_beta1 beta1
    b2 adam_beta2 beta2
    max_grad_norm grad_clip clip_grad gradient_clipping
    eval.every eval_steps eval_freq test_freq eval_interval
    eval.num_prompts num_eval_prompts eval_batch_size
    pass_at k pass_k pass_at_k
    checkpoint.every save_steps save_freq save_interval checkpoint_interval
    checkpoint.max_to_keep save_total_limit max_ckpt_to_keep max_actor_ckpt_to_keep
    """.replace("\\\n", "")
    .strip()
    .splitlines()
)
# How others sample, as vLLM, SGLang, OpenAI, transformers, TRL and verl call it. A command that has an option
# of that name offers it, and no other does: none of these is a slip of the keyboard.
_NOT_OFFERED = frozenset(
    [
        "allowed_token_ids",
        "assistant_model",
        "bad_words",
        "bad_words_ids",
        "begin_suppress_tokens",
        "beam_width",
        "constraints",
        "detokenize",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "echo",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "extra_args",
        "flat_logprobs",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "force_words_ids",
        "frequency_penalty",
        "function_call",
        "functions",
        "grammar",
        "guidance_scale",
        "guided_choice",
        "guided_decoding",
        "guided_decoding_regex",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "include_stop_str_in_output",
        "json_schema",
        "length_penalty",
        "logit_bias",
        "logits_processor",
        "logits_processors",
        "lora_request",
        "min_p",
        "min_lr",
        "min_tokens",
        "mirostat",
        "modalities",
        "no_repeat_ngram_size",
        "no_stop_trim",
        "num_beam_groups",
        "num_beams",
        "parallel_tool_calls",
        "penalty_alpha",
        "presence_penalty",
        "prompt_logprobs",
        "prompt_lookup_num_tokens",
        "renormalize_logits",
        "repetition_penalty",
        "response_format",
        "sequence_bias",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_strings",
        "stop_token_ids",
        "stream",
        "structured_outputs",
        "suffix",
        "suppress_tokens",
        "thinking_token_budget",
        "tool_choice",
        "top_a",
        "top_logprobs",
        "top_n_sigma",
        "truncate_prompt_tokens",
        "typical_p",
        "use_beam_search",
        "watermark",
        "watermarking_config",
        "xtc_probability",
        "xtc_threshold",
    ]
)


def unknown(name: str, options: Collection[str], where: str = "") -> UserError:
    """The sentence that refuses `name`, and what was probably meant."""
    if any(known.startswith(f"{name}.") for known in options):
        return UserError(f"--{name}{where} is a section: write --{name}.OPTION (see --help).")
    near = meant(name, options)
    if near is None and is_not_offered(name):
        return UserError(f"option --{name}{where} is not offered here: leave it out (see --help).")
    hint = f"did you mean --{near} (see --help)?" if near else "--help lists every option."
    return UserError(f"unknown option --{name}{where}: {hint}")


def is_not_offered(name: str) -> bool:
    """Whether other projects have this sampling option: then it is not a typing mistake."""
    return name.rpartition(".")[2] in _NOT_OFFERED


def meant(name: str, known: Collection[str]) -> str | None:
    """The one of the names that are known that stands for the same thing, or is spelt like it.

    Args:
      name: not one of `known`; of dotted names the last part counts most.
    """
    leaf = name.rpartition(".")[2]
    by_leaf = {each.rpartition(".")[2]: each for each in reversed(list(known))}
    for names in _SAME:
        if leaf in names:
            for ours in names:
                if ours != name and (found := ours if ours in known else by_leaf.get(ours)):
                    return found
    if is_not_offered(name):
        return None
    near_leaf = get_close_matches(leaf, by_leaf, 1)
    if near := get_close_matches(name, known, 1) if "." in name or not near_leaf else []:
        return near[0]
    return by_leaf[near_leaf[0]] if near_leaf else None
