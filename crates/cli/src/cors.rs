//! CORS settings: the origins whose pages may use a broker, from flags, then the environment, then the config file.

use cobox_broker::Cors;

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Browsers")]
pub struct CorsArgs {
    /// Allow browser pages of this origin, such as http://localhost:5173; may be repeated
    #[arg(long, value_name = "ORIGIN", env = "COBOX_CORS_ALLOW_ORIGIN", value_delimiter = ',')]
    cors_allow_origin: Vec<String>,
    /// Allow only this method; may be repeated
    #[arg(long, value_name = "METHOD", env = "COBOX_CORS_ALLOW_METHOD", value_delimiter = ',')]
    cors_allow_method: Vec<String>,
    /// Allow only this header; may be repeated
    #[arg(long, value_name = "HEADER", env = "COBOX_CORS_ALLOW_HEADER", value_delimiter = ',')]
    cors_allow_header: Vec<String>,
}

impl CorsArgs {
    /// Values from flags and environment replace those of the file.
    pub fn apply(self, cors: &mut Cors) {
        for (explicit, configured) in [
            (self.cors_allow_origin, &mut cors.allow_origins),
            (self.cors_allow_method, &mut cors.allow_methods),
            (self.cors_allow_header, &mut cors.allow_headers),
        ] {
            if !explicit.is_empty() {
                *configured = explicit;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        cors: CorsArgs,
    }

    #[test]
    fn flags_override_the_config_file_and_can_be_repeated() {
        let origin = "http://localhost:5173";
        let arguments = ["cobox", "--cors-allow-origin", origin, "--cors-allow-method", "GET", "--cors-allow-method", "POST"];
        let mut cors = Cors { allow_origins: vec!["https://old.example".into()], allow_headers: vec!["range".into()], ..Cors::default() };
        CommandLine::parse_from(arguments).cors.apply(&mut cors);
        assert_eq!(cors.allow_origins, [origin]);
        assert_eq!(cors.allow_methods, ["GET", "POST"]);
        assert_eq!(cors.allow_headers, ["range"]);
    }
}
