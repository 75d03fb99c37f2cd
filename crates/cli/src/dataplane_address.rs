//! The addresses at which clients reach sandboxes, if not the broker's own: flags, then the environment, then the
//! config file.

use std::net::SocketAddr;

use cobox_broker::Config;

use crate::daemon;

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Separate dataplane address")]
pub struct DataplaneAddressArgs {
    /// Serve each sandbox on its own host name, SANDBOX_ID.DOMAIN, which serves no broker API
    #[arg(long, value_name = "DOMAIN", env = "COBOX_DATAPLANE_DOMAIN")]
    dataplane_domain: Option<String>,
    /// Additional listen address that serves only sandboxes
    #[arg(long, value_name = "ADDR", env = "COBOX_GATEWAY_LISTEN", value_parser = daemon::parse_address)]
    gateway_listen: Option<SocketAddr>,
    /// External URL of the additional address, such as https://box.example.com
    #[arg(long, value_name = "URL", env = "COBOX_GATEWAY_URL")]
    gateway_url: Option<String>,
    /// Serve sandboxes on the broker's own origin, too
    #[arg(long, env = "COBOX_DATAPLANE_ON_MAIN_ORIGIN")]
    dataplane_on_main_origin: bool,
}

impl DataplaneAddressArgs {
    /// Values from flags and environment replace those of the file.
    pub fn apply(self, config: &mut Config) {
        // An empty variable counts as unset.
        for (explicit, configured) in [(self.dataplane_domain, &mut config.dataplane_domain), (self.gateway_url, &mut config.gateway_url)] {
            if let Some(explicit) = explicit.filter(|n| !n.is_empty()) {
                *configured = Some(explicit);
            }
        }
        config.gateway_listen = self.gateway_listen.or(config.gateway_listen);
        config.dataplane_on_main_origin |= self.dataplane_on_main_origin;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        dataplane_address: DataplaneAddressArgs,
    }

    #[test]
    fn flags_override_the_config_file() {
        let arguments =
            ["cobox", "--dataplane-domain", "box.example.com", "--gateway-listen", "8422", "--gateway-url", "https://box.example.com"];
        let mut config = Config { dataplane_domain: Some("old.example".into()), dataplane_on_main_origin: true, ..Config::default() };
        CommandLine::parse_from(arguments).dataplane_address.apply(&mut config);
        assert_eq!(config.dataplane_domain.as_deref(), Some("box.example.com"));
        assert_eq!(config.gateway_listen, Some("127.0.0.1:8422".parse().unwrap()));
        assert_eq!(config.gateway_url.as_deref(), Some("https://box.example.com"));
        assert!(config.dataplane_on_main_origin, "the value from the file is kept");
        assert!(config.validate().is_ok());
    }
}
