//! `cobox policy`: checks a policy file and explains what a principal is allowed. Works without a broker.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cobox_broker::policy::{Policy, PolicyError, Subject};
use cobox_protocol::{CapabilitySet, key::PrincipalKind};
use serde_json::json;

use super::{HiddenBrokerFlags, Outcome, keys::PrincipalKindArg};
use crate::{
    context::{Context, default_data_dir},
    failure::Failure,
    printer::table,
};

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
Examples:
  cobox policy check policy.toml
  cobox policy explain --workspace default --principal ci --kind agent
  cobox policy explain --policy new.toml --principal ann --capabilities exec")]
pub enum PolicyCommand {
    /// Check a policy file and report errors with their lines; exits with 1 if it has errors
    Check {
        #[command(flatten)]
        _hidden_flags: HiddenBrokerFlags,
        /// The policy file
        file: PathBuf,
    },
    /// Explain a principal's permissions: for each capability and limit, the value and the line that sets it
    Explain(ExplainArgs),
}

#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    #[command(flatten)]
    _hidden_flags: HiddenBrokerFlags,
    /// The policy file [default: policy.toml in the default data directory, or the built-in policy if that is
    /// missing]
    #[arg(long, value_name = "FILE", env = "COBOX_POLICY")]
    policy: Option<PathBuf>,
    /// The principal's workspace
    #[arg(long, default_value = "default")]
    workspace: String,
    /// Name of the principal
    #[arg(long, value_name = "NAME")]
    principal: String,
    /// Kind of principal
    #[arg(long, value_enum)]
    kind: PrincipalKindArg,
    /// Kind to act as, if it has fewer permissions than the principal's own kind
    #[arg(long, value_enum, value_name = "KIND")]
    acting_as: Option<PrincipalKindArg>,
    /// Requested capabilities [default: those granted when none are requested]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    capabilities: Vec<String>,
}

pub fn run(command: PolicyCommand, context: &Context) -> Outcome {
    match command {
        PolicyCommand::Check { file, .. } => check(&file, context),
        PolicyCommand::Explain(args) => explain(args, context),
    }
}

fn check(file: &Path, context: &Context) -> Outcome {
    match read_policy(file)? {
        Ok(_) => {
            context.printer.result(&json!({ "file": file, "problems": [] }), || format!("{} is valid", file.display()))?;
            Ok(0)
        }
        Err(error) => {
            let problems: Vec<_> = error.problems.iter().map(|p| json!({ "line": p.line, "message": p.message })).collect();
            let lines: Vec<String> = error.problems.iter().map(|p| format!("{}:{}: {}", file.display(), p.line, p.message)).collect();
            context.printer.result(&json!({ "file": file, "problems": problems }), || lines.join("\n"))?;
            Ok(1)
        }
    }
}

fn explain(args: ExplainArgs, context: &Context) -> Outcome {
    let file = args.policy.or_else(|| {
        let found = default_data_dir(&|name| std::env::var_os(name))?.join("policy.toml");
        found.exists().then_some(found)
    });
    let policy = match &file {
        Some(file) => read_policy(file)?.map_err(|e| Failure::new(format!("{} is invalid:\n{e}", file.display())))?,
        None => Policy::default(),
    };
    let kind = PrincipalKind::from(args.kind);
    let acting = args.acting_as.map_or(kind, PrincipalKind::from);
    let subject = Subject { workspace: &args.workspace, principal: &args.principal, kind, acting };
    let requested = match args.capabilities.as_slice() {
        [] => None,
        names => Some(CapabilitySet::parse(names).map_err(|e| Failure::new(format!("--capabilities: {e}")))?),
    };
    let explanation = policy.explain(&subject, requested);
    context.printer.result(&json!({ "policy": file, "capabilities": explanation.capabilities, "limits": explanation.limits }), || {
        let capabilities: Vec<Vec<String>> = explanation
            .capabilities
            .iter()
            .map(|f| vec![f.capability.to_owned(), f.outcome.as_str().to_owned(), f.because.clone()])
            .collect();
        let limits: Vec<Vec<String>> =
            explanation.limits.iter().map(|(name, value, by)| vec![(*name).to_owned(), value.clone(), by.clone()]).collect();
        let source = file.as_ref().map_or_else(|| "built-in policy".to_owned(), |f| f.display().to_string());
        format!(
            "{source}, for {} {} of workspace {}\n\n{}\n\n{}",
            acting.as_str(),
            args.principal,
            args.workspace,
            table(&["CAPABILITY", "", "BECAUSE"], &capabilities),
            table(&["LIMIT", "", "SET BY"], &limits)
        )
    })?;
    Ok(0)
}

fn read_policy(file: &Path) -> Result<Result<Policy, PolicyError>, Failure> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    Ok(Policy::from_toml(&text))
}
