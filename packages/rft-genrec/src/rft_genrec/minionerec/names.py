"""MiniOneRec's scripts and their parameters, each with the command and the setting that stand for it.

The spellings are those of the scripts and of the guide that was written about them; `docs/genrec/data.md` shows the
table.
"""

from __future__ import annotations

from rft_genrec.minionerec.script_records import Parameter, Script, taken
from rft_genrec.minionerec.sid_names import SID_SCRIPTS

_FROM_CATALOGUE = "samples are read from the directory of the catalogue"
_SAMPLE_FILES = (
    Parameter("train_file", refusal=_FROM_CATALOGUE, do="--catalogue DIRECTORY"),
    Parameter("eval_file", refusal=_FROM_CATALOGUE, do="--catalogue DIRECTORY"),
)
_INFO_FILE = Parameter("info_file", refusal="what may follow is read from the IDs", do="--catalogue DIRECTORY")
_CATEGORY = Parameter("category", refusal="the catalogue says what it is of", do="--catalogue DIRECTORY")
_IDS = (
    Parameter("sid_index_path", "sid_index_path"),
    Parameter("item_meta_path", "item_meta_path"),
)
_TRAINER = (
    Parameter("per_device_train_batch_size", "micro_train_batch_size", "the largest micro-batch of a rank"),
    Parameter("gradient_accumulation_steps", "train_batch_size", "micro-batch x accumulation x ranks"),
    Parameter("max_grad_norm", "max_norm"),
    Parameter("wandb_project", "use_wandb"),
    Parameter("wandb_run_name", "wandb_run_name"),
    Parameter("output_dir", "save_path"),
    Parameter("resume_from_checkpoint", "ckpt_path", "with load_checkpoint"),
    Parameter("bf16", "bf16"),
    Parameter("fp16", "fp16"),
    Parameter("zero_stage", "zero_stage"),
    Parameter("offload_optimizer_device", "adam_offload", "cpu, with a stage of ZeRO; none = off"),
    Parameter(
        "offload_param_device",
        refusal="weights of ZeRO stay on the GPU",
        do="--fsdp --fsdp_cpu_offload",
        about="none is accepted",
    ),
    Parameter("deepspeed_config", "zero_stage", "accelerate's or DeepSpeed's file, read for all that it holds"),
    Parameter("seed", "seed"),
)
_NOT_AT_ANY_TEMPERATURE = Parameter(
    "temperature", refusal="beams are ranked by probability, which no temperature reorders", do="--num_beams 50"
)

SFT = Script(
    ("sft.sh", "sft.py"),
    "genrec-sft",
    parameters=(
        *_SAMPLE_FILES,
        _CATEGORY,
        *_IDS,
        Parameter("base_model", "pretrain"),
        Parameter("sample", "max_samples", "-1 is 0, all"),
        Parameter("batch_size", "train_batch_size", "rows of a step over all ranks"),
        Parameter("micro_batch_size", "micro_train_batch_size"),
        Parameter("num_epochs", "max_epochs"),
        Parameter("num_train_epochs", "max_epochs"),
        Parameter("learning_rate", "learning_rate"),
        Parameter("cutoff_len", "max_len"),
        Parameter("group_by_length", refusal="rows of like length need no padding when packed", do="--packing_samples"),
        Parameter("freeze_LLM", "freeze_llm"),
        Parameter(
            "train_from_scratch",
            refusal="a new decoder is made where no model is named",
            do="--pretrain= --hidden_size 64",
            about="false is accepted",
        ),
        *_TRAINER,
    ),
)
RL = Script(
    ("rl.sh", "rl.py"),
    "genrec-rl",
    parameters=(
        *_SAMPLE_FILES,
        _INFO_FILE,
        _CATEGORY,
        *_IDS,
        Parameter("model_path", "pretrain"),
        Parameter("train_batch_size", "train_batch_size", "here responses of a step over all ranks"),
        Parameter("eval_batch_size", refusal="a test is a command of its own", do="rft-train genrec eval"),
        Parameter("num_train_epochs", "num_episodes"),
        Parameter("learning_rate", "actor_learning_rate"),
        Parameter("num_generations", "n_samples_per_prompt"),
        Parameter("temperature", "temperature"),
        Parameter("beta", "init_kl_coef"),
        Parameter(
            "reward_type", "genrec_reward", "rule; ranking = rule,ranking; ranking_only = ranking; semantic; sasrec"
        ),
        Parameter("beam_search", "group_source", "true = beams, each counted alike; false = samples"),
        Parameter("dapo", "loss_agg_mode", "true = token-mean"),
        Parameter("gspo", "use_gspo"),
        Parameter("mask_all_zero", "filter_groups"),
        Parameter("dynamic_sampling", "dynamic_sampling", "here groups without a difference are drawn again"),
        Parameter(
            "add_gt",
            refusal="the target in the place of a sample was not drawn by the policy",
            do="--genrec_reward rule,prefix",
            about="false is accepted",
        ),
        Parameter(
            "sync_ref_model",
            refusal="the reference is the model at the start",
            do="--init_kl_coef 0.001",
            about="false is accepted",
        ),
        Parameter(
            "sample_train",
            refusal="a number of rows says how many",
            do="--max_samples 10000",
            about="false is accepted",
        ),
        Parameter(
            "test_during_training",
            refusal="evaluation is by steps, on the validation split",
            do="--eval_steps 100",
            about="false is accepted",
        ),
        Parameter("eval_step", refusal="evaluation is by whole steps, not by a share", do="--eval_steps 100"),
        Parameter("test_beam", refusal="a test with beams is a command of its own", do="rft-train genrec eval"),
        Parameter(
            "ada_path", refusal="embeddings are read from a .npy file, never from a pickle", do="--item_embeddings FILE"
        ),
        Parameter("cf_path", "item_scorer_path"),
        Parameter("gpu_memory_utilization", "engine_mem_util"),
        *_TRAINER,
    ),
)
EVALUATE = Script(
    ("evaluate.sh", "evaluate.py"),
    "genrec-eval",
    parameters=(
        Parameter("base_model", "pretrain"),
        _SAMPLE_FILES[0],
        _INFO_FILE,
        _CATEGORY,
        Parameter("test_data_path", refusal=_FROM_CATALOGUE, do="--catalogue DIRECTORY --split test"),
        Parameter("result_json_data", "output", "a directory"),
        Parameter("batch_size", "search_batch_size"),
        Parameter("num_beams", "num_beams"),
        Parameter("seed", "seed"),
        Parameter("K", refusal="it was not used", do="--ks 1,3,5,10,20,50", about="0 is accepted"),
        Parameter(
            "length_penalty", refusal="IDs are ranked by their probability", do="--num_beams 50", about="0 is accepted"
        ),
        Parameter("max_new_tokens", refusal="an ID ends where the tree of IDs ends", do="--num_beams 50"),
        _NOT_AT_ANY_TEMPERATURE,
        Parameter("guidance_scale", refusal="evaluate.py does not take it either", do="--num_beams 50"),
    ),
)
_PARTS = "each rank takes a part of the rows, and the parts are joined by the numbers of the rows"
_EVAL_SAMPLES = "rft-train genrec eval --max_eval_samples 1000"
SPLIT = Script(
    ("split.py",),
    "genrec-eval",
    parameters=(
        Parameter("input_path", refusal=_FROM_CATALOGUE, do="--catalogue DIRECTORY"),
        Parameter("output_path", refusal=_PARTS, do="--output DIRECTORY"),
        Parameter("cuda_list", refusal=_PARTS, do="CUDA_VISIBLE_DEVICES=0,1 rft-train genrec eval --nproc 2"),
    ),
)
MERGE = Script(("merge.py",), "genrec-eval", parameters=SPLIT.parameters)
CALC = Script(
    ("calc.py",),
    "genrec-eval",
    parameters=(
        Parameter("path", refusal="measures are computed where rows are ranked", do="--output DIRECTORY"),
        Parameter("item_path", refusal="items are read from the directory", do="--catalogue DIRECTORY"),
    ),
)
AMAZON = Script(
    ("data/amazon18_data_process.sh", "data/amazon18_data_process.py", "data/process.py"),
    "genrec-data",
    "--source amazon",
    (
        Parameter("dataset", "dataset_name"),
        Parameter("reviews_file", "input"),
        Parameter("metadata_file", "items_file"),
        Parameter("output_path", "save_path"),
        *taken("user_k", "item_k"),
        Parameter("st_year", "start_date", "with st_month: YEAR-MONTH"),
        Parameter("st_month", "start_date", "with st_year"),
        Parameter("ed_year", "end_date", "with ed_month: YEAR-MONTH"),
        Parameter("ed_month", "end_date", "with ed_year"),
    ),
)
CONVERT = Script(
    ("convert_dataset.sh", "convert_dataset.py"),
    "genrec-data",
    "--source minionerec",
    (
        Parameter("data_dir", "input"),
        Parameter("dataset_name", "dataset_name"),
        Parameter("output_dir", "save_path"),
        Parameter("category", refusal="files are named train.csv, valid.csv and test.csv", do="--dataset_name NAME"),
        Parameter("max_valid_samples", refusal="samples are left out where they are used", do=_EVAL_SAMPLES),
        Parameter("max_test_samples", refusal="samples are left out where they are used", do=_EVAL_SAMPLES),
        Parameter("seed", refusal="nothing is drawn", do="leave it out"),
        Parameter(
            "keep_longest_only",
            refusal="training takes one row a person by itself",
            do="rft-train genrec sft --rows sequences",
        ),
    ),
)
EMBED = Script(
    ("rq/text2emb/amazon_text2emb.sh", "rq/text2emb/amazon_text2emb.py"),
    "genrec-embed",
    parameters=(
        Parameter("dataset", refusal="the catalogue is a directory", do="--catalogue DIRECTORY"),
        Parameter("root", "catalogue"),
        Parameter("plm_checkpoint", "encoder"),
        Parameter("plm_name", refusal="the file is named after the encoder", do="--encoder DIRECTORY"),
        Parameter("max_sent_len", "max_tokens"),
        Parameter("word_drop_ratio", refusal="a text is encoded as it is", do="leave it out", about="-1 is accepted"),
    ),
)
SCRIPTS: tuple[Script, ...] = (SFT, RL, EVALUATE, SPLIT, MERGE, CALC, AMAZON, CONVERT, EMBED, *SID_SCRIPTS)
"""All scripts of MiniOneRec that do one of the stages."""


def script(path: str) -> Script:
    """Return the record of a script by its path in MiniOneRec's repository.

    Raises:
        KeyError: it has none.
    """
    return {name: record for record in SCRIPTS for name in record.paths}[path]
