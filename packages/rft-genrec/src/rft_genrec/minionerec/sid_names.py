"""MiniOneRec's scripts in `rq/`, which all become `rft-train genrec sid`."""

from __future__ import annotations

from rft_genrec.minionerec.script_records import Parameter, Script

_ONE_PROCESS = "vectors are in memory, and no process loads them"
_ALWAYS_ADAMW = "the optimizer is AdamW"
_EMBEDDINGS = Parameter("data_path", "embeddings")
_SIZES = Parameter("num_emb_list", "codes", "joined by commas: 256,256,256; their number is levels")
_NETWORK = (
    Parameter("lr", "vae_learning_rate"),
    Parameter("epochs", "vae_epochs"),
    Parameter("batch_size", "vae_batch_size"),
    Parameter("num_workers", refusal=_ONE_PROCESS, do="leave it out"),
    Parameter("eval_step", refusal="the report measures the end", do="--held_out_share 0.1"),
    Parameter("learner", refusal=_ALWAYS_ADAMW, do="leave it out", about="AdamW is accepted"),
    Parameter("lr_scheduler_type", refusal="the rate is constant", do="leave it out", about="constant is accepted"),
    Parameter("warmup_epochs", refusal="the warm-up has 50 epochs", do="leave it out", about="50 is accepted"),
    _EMBEDDINGS,
    Parameter("weight_decay", refusal="it is 0", do="leave it out", about="0 is accepted"),
    Parameter("dropout_prob", refusal="it is 0", do="leave it out", about="0 is accepted"),
    Parameter("bn", refusal="the layers have no batch norm", do="leave it out", about="false is accepted"),
    Parameter("loss_type", refusal="the loss is the squared error", do="leave it out", about="mse is accepted"),
    Parameter("kmeans_init", refusal="codes start from k-means", do="leave it out", about="true is accepted"),
    Parameter("kmeans_iters", "kmeans_iterations"),
    Parameter("sk_epsilons", refusal="optimal transport is for collisions alone", do="--collisions sinkhorn"),
    Parameter("sk_iters", refusal="optimal transport runs until it is even", do="--collisions sinkhorn"),
    Parameter("device", "device", "cuda:0 is cuda"),
    _SIZES,
    Parameter("e_dim", "latent_dim"),
    Parameter("quant_loss_weight", refusal="it is 1", do="--commitment 0.25", about="1 is accepted"),
    Parameter("beta", "commitment"),
    Parameter("layers", "hidden_dims", "joined by commas"),
    Parameter("save_limit", refusal="the end is written, and no step before it", do="leave it out"),
    Parameter("ckpt_dir", "save_path"),
)
_INDICES = (
    Parameter("data_path", "embeddings"),
    Parameter("ckpt_path", refusal="training and assignment are one command", do="--method rqkmeans_plus"),
    _SIZES,
    Parameter("e_dim", "latent_dim"),
    Parameter("layers", "hidden_dims", "joined by commas"),
    Parameter("batch_size", "vae_batch_size"),
    Parameter("num_workers", refusal=_ONE_PROCESS, do="leave it out"),
    Parameter("device", "device", "cuda:0 is cuda"),
)
SID_SCRIPTS = (
    Script(("rq/rqvae.sh", "rq/rqvae.py"), "genrec-sid", "--method rqvae --collisions sinkhorn", _NETWORK),
    Script(
        ("rq/generate_indices.py",),
        "genrec-sid",
        "--method rqvae --collisions sinkhorn",
    ),
    Script(
        ("rq/rqkmeans_plus.sh", "rq/rqkmeans_plus.py"),
        "genrec-sid",
        "--method rqkmeans_plus --collisions extra",
        (*_NETWORK, Parameter("pretrained_codebook_path", "codebooks")),
    ),
    Script(
        ("rq/generate_indices_plus.sh", "rq/generate_indices_plus.py"),
        "genrec-sid",
        "--method rqkmeans_plus --collisions extra",
        _INDICES,
    ),
    Script(
        ("rq/rqkmeans_faiss.py",),
        "genrec-sid",
        "--method rqkmeans --collisions keep",
        (
            Parameter("dataset", refusal="the catalogue is a directory", do="--catalogue DIRECTORY"),
            _EMBEDDINGS,
            Parameter("num_levels", "levels"),
            Parameter("codebook_size", "codes"),
            Parameter("uniform", "method", "true = rqkmeans_balanced"),
            Parameter("iters", refusal="it was not used", do="--kmeans_iterations 100"),
            Parameter("batch_size", refusal="it changes no result", do="leave it out"),
            Parameter("output_root", "save_path"),
        ),
    ),
    Script(
        ("rq/rqkmeans_constrained.sh", "rq/rqkmeans_constrained.py"),
        "genrec-sid",
        "--method rqkmeans_balanced --collisions extra",
        (
            Parameter("root", "catalogue"),
            Parameter("dataset", refusal="the catalogue is a directory", do="--catalogue DIRECTORY"),
            Parameter("k", "codes"),
            Parameter("l", "levels"),
            Parameter("max_iter", "kmeans_iterations"),
            Parameter("seed", "seed"),
            Parameter("verbose", refusal="the report is shown in any case", do="leave it out"),
        ),
    ),
)
